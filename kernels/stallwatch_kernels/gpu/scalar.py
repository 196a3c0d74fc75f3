"""What the Triton kernels share: E4M3 and E2M1 by their bits, and products whose precision is said.

Codes are decoded by integer arithmetic and not by the device's own conversions, which exist from SM89 on only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from stallwatch_kernels.errors import BadLayout


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a part of one, in Triton's language, which has no types that a checker could use."""
    return triton.jit(function)


@jit
def e4m3(
    code: tl.tensor,
) -> tl.tensor:
    """The float32 of an E4M3 code: its bits are those of a float16, 256 times too small."""
    bits = ((code & 0x80).to(tl.int16) << 8) | ((code & 0x7F).to(tl.int16) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@jit
def e2m1(
    code: tl.tensor,
) -> tl.tensor:
    """The float32 of an E2M1 code: 0 .5 1 1.5 2 3 4 6, bit 3 the sign."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    power = (1 << exponent.to(tl.int32)).to(tl.float32)
    value = tl.where(exponent == 0, 0.5 * mantissa, (2.0 + mantissa) * power * 0.25)
    return tl.where((code & 8) != 0, -value, value)


@jit
def cast(
    value: tl.tensor,
    like: tl.tensor,
) -> tl.tensor:
    """A float32 in the element type of the pointer `like`, to nearest, ties to even.

    bfloat16 is rounded here: the cast of Triton's interpreter cuts the lower bits off.
    """
    if like.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)  # noqa: PLR0124
    return value.to(like.dtype.element_ty)


@jit
def product(
    a: tl.tensor,
    b: tl.tensor,
    PRECISE: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """A @ b in float32. `PRECISE`: float32 operands and IEEE products, else the operands' own 16 bits.

    Triton's interpreter is wrong for bfloat16 operands of tl.dot: there only PRECISE may be used.
    """
    if PRECISE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:  # noqa: RET505  (Triton takes one return per constexpr branch)
        return tl.dot(a, b)


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is not below `n` nor `least`: the shapes that Triton has."""
    return max(least, 1 << (n - 1).bit_length())


def same_device(kernel: str, tensors: dict[str, Any]) -> None:
    """Refuse arguments on different devices."""
    devices = {str(t.device) for t in tensors.values()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise BadLayout(kernel, "tensors", f"must be on one device: {where}")
