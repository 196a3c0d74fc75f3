"""How near a kernel's result must be to float64: one bar for all of them."""

import torch

FP32 = 1e-6
ULP_SHARE = 0.01


def judged(got, exact):
    """fp32: relative L2 to float64 at most 1e-6. bf16: at most 1 ulp, on at most 1 % of the elements.

    An element near zero because its terms cancel has an ulp below the rounding of those terms: there, fp32's own
    bar, taken at the tensor's root mean square, replaces the ulp; times 8, because it is one element's error and not
    the mean over all. One element may always be off: of a few dozen it is more than 1 %.
    """
    assert torch.isfinite(got).all()
    if got.dtype == torch.float32:
        assert ((got.double() - exact).norm() / exact.norm()).item() <= FP32
        return
    steps = steps_between(got, exact.to(torch.bfloat16))
    rounding = 8 * FP32 * exact.pow(2).mean().sqrt() + exact.abs() * 2**-9
    beyond = (got.double() - exact).abs() > rounding
    assert (steps[beyond] <= 1).all()
    assert int((steps > 0).sum()) <= max(1, ULP_SHARE * steps.numel())


def steps_between(a, b):
    """How many representable numbers lie between two tensors of a 16-bit float type, element by element."""

    def ordered(x):
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(a) - ordered(b)).abs()
