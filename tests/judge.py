"""How near a kernel's result must be to float64: one bar for all of them."""

import torch

FP32 = 1e-6
ULP_SHARE = 0.01


def judged(got, exact):
    """fp32: relative L2 to float64 at most 1e-6. bf16: at most 1 ulp, on at most 1 % of the elements.

    An element near zero because its terms cancel has an ulp below the rounding of those terms: there, fp32's own
    bar, taken at the tensor's root mean square, replaces the ulp.
    """
    assert torch.isfinite(got).all()
    if got.dtype == torch.float32:
        assert ((got.double() - exact).norm() / exact.norm()).item() <= FP32
        return
    steps = steps_between(got, exact.to(torch.bfloat16))
    rounding = FP32 * exact.pow(2).mean().sqrt() + exact.abs() * 2**-9
    beyond = (got.double() - exact).abs() > rounding
    assert (steps[beyond] <= 1).all()
    assert (steps > 0).float().mean() <= ULP_SHARE


def steps_between(a, b):
    """How many representable numbers lie between two tensors of a 16-bit float type, element by element."""

    def ordered(x):
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(a) - ordered(b)).abs()
