"""NVFP4 encode and decode, the torch reference of every kernel that reads it.

w = code * scale * global, where a code is a sign and one of 0 .5 1 1.5 2 3 4 6, two codes share a byte
(the low nibble is the earlier element), 16 adjacent elements of the last axis share one E4M3 scale, and a
tensor (or each of its slices) has one float32 global: 4.5 bits a weight and a rounding error of about
0.095 of a Gaussian's norm. An E4M3 scale of NaN (codes 0x7F, 0xFF) is refused wherever it is met.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stallwatch_kernels.errors import BadDtype, BadScale, BadShape

GROUP = 16
LARGEST = 6.0
LARGEST_SCALE = 448.0  # of E4M3

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OP = "nvfp4"
# Between codes c and c + 1: a tie goes to the even one, so down after an even code and up after an odd.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


@dataclass(frozen=True, slots=True)
class Packed:
    """codes uint8 [..., K/2], scales float8_e4m3fn [..., K/16], global_scale float32, broadcast over both."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor


def quantise(weights: torch.Tensor, global_scale: torch.Tensor | None = None) -> Packed:
    """The nearest codes of float weights [..., K], K a multiple of 16.

    Without a global scale: amax / (6 * 448), which lets the largest block scale be 448. A block whose
    scale rounds to zero has codes 0; nothing is divided by it. Raises BadScale for weights that are not finite.
    """
    _check_weights(weights)
    wide = weights.to(torch.float32)
    given = default_global(wide) if global_scale is None else global_scale.to(torch.float32)
    check_global(given)
    blocks = wide.unflatten(-1, (-1, GROUP))
    amax = blocks.abs().amax(-1)
    wanted = (amax / LARGEST / _over(given, amax)).clamp(max=LARGEST_SCALE)
    scales = wanted.to(torch.float8_e4m3fn)
    step = scales.to(torch.float32) * _over(given, amax)
    zero = step == 0
    units = blocks.abs() / torch.where(zero, 1.0, step)[..., None]
    codes = _nearest(units) | (torch.signbit(blocks).to(torch.uint8) << 3)
    codes = torch.where(zero[..., None], 0, codes).to(torch.uint8).flatten(-2)
    return Packed(pack(codes), scales, given)


def dequantise(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weights [..., K]. code * scale is exact; the global is multiplied last, with one rounding."""
    check(packed)
    table = torch.tensor(VALUES + tuple(-v for v in VALUES), dtype=dtype)
    values = table[unpack(packed.codes).long()].unflatten(-1, (-1, GROUP))
    scaled = values * packed.scales.to(dtype)[..., None]
    return scaled.flatten(-2) * _over(packed.global_scale.to(dtype), scaled.flatten(-2))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15, one a byte [..., K], as two a byte [..., K/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """The reverse of `pack`."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def default_global(weights: torch.Tensor) -> torch.Tensor:
    """The largest weight / (6 * 448), a float32 scalar; 1 for weights that are all zero."""
    amax = weights.abs().max().to(torch.float32)
    least = torch.finfo(torch.float32).tiny
    return torch.where(amax > 0, (amax / (LARGEST * LARGEST_SCALE)).clamp(min=least), 1.0)


def check(packed: Packed) -> None:
    """Raise BadDtype, BadShape or BadScale for parts that cannot belong together."""
    if packed.codes.dtype != torch.uint8:
        raise BadDtype(_OP, "codes", f"are {packed.codes.dtype}; expected uint8")
    if packed.scales.dtype != torch.float8_e4m3fn:
        raise BadDtype(_OP, "scales", f"are {packed.scales.dtype}; expected float8_e4m3fn")
    expected = (*packed.codes.shape[:-1], packed.codes.shape[-1] * 2 // GROUP)
    if packed.codes.shape[-1] * 2 % GROUP or tuple(packed.scales.shape) != expected:
        raise BadShape(
            _OP, "scales", f"are {tuple(packed.scales.shape)} for codes {tuple(packed.codes.shape)}"
        )
    if bool((packed.scales.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise BadScale(_OP, "scales", "hold a NaN (E4M3 code 0x7F or 0xFF)")
    check_global(packed.global_scale)


def check_global(scale: torch.Tensor) -> None:
    """A global scale is finite and positive."""
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise BadScale(_OP, "global_scale", "must be finite and positive")


def _check_weights(weights: torch.Tensor) -> None:
    if not weights.dtype.is_floating_point:
        raise BadDtype(_OP, "weights", f"are {weights.dtype}; expected a float type")
    if weights.ndim < 1 or weights.numel() == 0 or weights.shape[-1] % GROUP:
        raise BadShape(_OP, "weights", f"are {tuple(weights.shape)}; the last axis must be 16 n")
    if not bool(torch.isfinite(weights).all()):
        raise BadScale(_OP, "weights", "are not finite, so no scale can be")


def _nearest(units: torch.Tensor) -> torch.Tensor:
    codes = torch.zeros(units.shape, dtype=torch.uint8)
    for border in _TIES_DOWN:
        codes += units > border
    for border in _TIES_UP:
        codes += units >= border
    return codes


def _over(scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A global per leading index, shaped to broadcast over `values`."""
    return scale.reshape(*scale.shape, *([1] * (values.ndim - scale.ndim)))
