"""Rows of an n-gram table on the device, dequantised to float32 and cast once: one program a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from stallwatch_kernels.errors import BadDtype, BadIndex, BadShape
from stallwatch_kernels.gpu.scalar import cast, e2m1, e4m3, jit, power_of_two, same_device
from stallwatch_kernels.ple.table import Format

KERNEL = "gather-triton"
_FORMATS = {f: number for number, f in enumerate(Format)}
_FP8, _INT8, _INT4, _NVFP4 = (
    tl.constexpr(_FORMATS[f]) for f in (Format.FP8, Format.INT8, Format.INT4, Format.NVFP4)
)


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """One shard as `ple.table` stores it, on the device: codes [rows, ...], scales [rows, groups] or None."""

    format: Format
    dim: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    factor: float = 1.0
    group: int = 16


def gather(table: DeviceTable, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows `[n]` int64 as `[n, dim]` in float32, bfloat16 or float16. Reads their bounds back: it waits."""
    codes, scales = table.codes, table.scales
    present = {"codes": codes, "rows": rows} | ({} if scales is None else {"scales": scales})
    same_device(KERNEL, present)
    if rows.dtype != torch.int64 or rows.ndim != 1 or not rows.is_contiguous():
        raise BadDtype(KERNEL, "rows", f"are {rows.dtype}{tuple(rows.shape)}; expected int64 [n]")
    if table.format.grouped != (scales is not None):
        raise BadShape(KERNEL, "scales", f"do not go with {table.format}")
    out = torch.empty(rows.numel(), table.dim, dtype=dtype, device=codes.device)
    if not rows.numel():
        return out
    if int(rows.min()) < 0 or int(rows.max()) >= codes.shape[0]:
        raise BadIndex(KERNEL, "rows", f"leave the table's {codes.shape[0]}")
    gather_row[(rows.numel(),)](
        _readable(codes),
        codes.shape[1],
        _readable(codes if scales is None else scales),
        0 if scales is None else scales.shape[1],
        rows,
        out,
        table.dim,
        table.group,
        table.factor,
        FORMAT=_FORMATS[table.format],
        BLOCK=power_of_two(table.dim),
    )
    return out


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@jit
def gather_row(  # noqa: PLR0913, PLR0917
    codes: tl.tensor,
    code_step: tl.tensor,
    scales: tl.tensor,
    scale_step: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    dim: tl.tensor,
    group: tl.tensor,
    factor: tl.tensor,
    FORMAT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """One row."""
    place = tl.program_id(0)
    row = tl.load(rows + place)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    packed: tl.constexpr = (FORMAT == _INT4) | (FORMAT == _NVFP4)
    at = column // 2 if packed else column
    code = tl.load(codes + row * code_step + at, mask=inside, other=0)
    if packed:
        code = (code >> ((column % 2) * 4).to(tl.uint8)) & 15
    if FORMAT == _FP8:
        value = e4m3(code) * factor
    elif FORMAT == _NVFP4:
        scale = tl.load(scales + row * scale_step + column // group, mask=inside, other=0)
        value = e2m1(code) * e4m3(scale) * factor
    elif FORMAT == _INT4:
        scale = tl.load(scales + row * scale_step + column // group, mask=inside, other=0)
        value = (code.to(tl.float32) - 8.0) * scale.to(tl.float32)
    elif FORMAT == _INT8:
        scale = tl.load(scales + row * scale_step + column // group, mask=inside, other=0)
        value = code.to(tl.float32) * scale.to(tl.float32)
    else:
        value = code.to(tl.float32)
    tl.store(out + place * dim + column, cast(value, out), mask=inside)
