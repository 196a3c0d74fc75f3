"""Torch tensors as the numpy arrays that compiled kernels read: the same memory, checked first.

numpy has neither bfloat16 nor float8: those pass as the unsigned integers of the same width, and the
kernels decode the bits (`bf16_to_f32` below; E4M3 through a table of 256 floats).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stallwatch_kernels.errors import BadDtype, BadLayout, BadScale, BadShape
from stallwatch_kernels.jit import inlined

Array = np.ndarray[Any, Any]

_AS_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
}


def array(kernel: str, name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> Array:
    """The tensor's memory as an array; its type must be one of `dtypes`, its device the CPU."""
    if tensor.device.type != "cpu":
        raise BadLayout(kernel, name, f"is on {tensor.device}, and this path runs on the CPU")
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise BadDtype(kernel, name, f"is {got}; expected {expected}")
    bits = _AS_BITS.get(tensor.dtype)
    plain = tensor.detach()
    viewed: Array = (plain if bits is None else plain.view(bits)).numpy()
    return viewed


def contiguous(kernel: str, name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> Array:
    """The same, and its elements must lie in order without gaps."""
    if not tensor.is_contiguous():
        raise BadLayout(
            kernel, name, f"has strides {tuple(tensor.stride())}; expected a contiguous tensor"
        )
    return array(kernel, name, tensor, *dtypes)


def apart(kernel: str, names: tuple[str, str], written: torch.Tensor, other: torch.Tensor) -> None:
    """Refuse an output that shares memory with another buffer, where a result would be read as an input.

    Columns of one wider matrix may lie beside each other. Raises BadLayout.
    """
    if _share(written, other):
        raise BadLayout(kernel, names[0], f"shares memory with {names[1]}")


def same_or_apart(
    kernel: str, names: tuple[str, str], written: torch.Tensor, other: torch.Tensor
) -> None:
    """The same for a kernel that may work in place: element for element, or not at all."""
    in_place = written.data_ptr() == other.data_ptr() and (
        written.shape == other.shape and written.stride() == other.stride()
    )
    if not in_place:
        apart(kernel, names, written, other)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    mine, other = _span(a), _span(b)
    if mine[1] <= other[0] or other[1] <= mine[0] or a.device != b.device:
        return False
    if not (a.numel() and b.numel()):
        return False
    step = _row_step(a, b)
    if step is None:
        return True
    distance = (b.data_ptr() - a.data_ptr()) % step
    return bool(distance < _width(a) or step - distance < _width(b))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one."""
    if tensor.is_contiguous():  # most are, and a call that is given `out` looks each time
        at = tensor.data_ptr()
        return at, at + tensor.nbytes
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _row_step(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Bytes from row to row if both are rows of one matrix, else None."""
    if a.ndim != 2 or b.ndim != 2 or a.stride(1) != 1 or b.stride(1) != 1:
        return None
    step = a.stride(0) * a.element_size()
    fits = step == b.stride(0) * b.element_size() and step >= max(_width(a), _width(b))
    return step if fits else None


def _width(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1] * tensor.element_size())


def check_eps(kernel: str, eps: float) -> np.float32:
    """The eps of a norm as float32: finite and positive, or BadScale."""
    if not (math.isfinite(eps) and eps > 0):
        raise BadScale(kernel, "eps", f"is {eps}; expected finite and positive")
    return np.float32(eps)


def check_rows(kernel: str, rows: int, most: int) -> None:
    """Refuse a bound call of more rows than its buffers hold."""
    if not 0 <= rows <= most:
        raise BadShape(kernel, "rows", f"= {rows}; the buffers hold {most}")


@inlined
def bf16_to_f32(bits: int) -> np.float32:
    """A bfloat16 given by its bits. Exact: it is the upper half of a float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def f32_to_bf16(value: float) -> np.uint16:
    """Rounded to the nearest bfloat16, ties to even, as torch does; NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(rounded >> np.uint32(16))


def e4m3_table() -> Array:
    """float32[256]: the value of every E4M3 code (bias 7, no infinity, codes 0x7F and 0xFF are NaN)."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    table: Array = codes.view(torch.float8_e4m3fn).to(torch.float32).numpy()
    return table
