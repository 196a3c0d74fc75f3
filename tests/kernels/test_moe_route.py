"""The router: softmax, top-k, ties, and transformers' own."""

from __future__ import annotations

import pytest
import torch

from oracle import tiny_model
from stallwatch_kernels.errors import BadDtype, BadShape
from stallwatch_kernels.moe.route import route, route_reference


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 3), (512, 10), (5, 5), (1, 1)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route_is_softmax_then_largest(experts: int, top_k: int, renormalise: bool) -> None:
    """Experts equal the reference's, weights are right to float32 rounding."""
    logits = gaussian(50, experts, seed=1) * 3
    weights, chosen = route(logits, top_k, renormalise=renormalise)
    expected, experts_expected = route_reference(logits.double(), top_k, renormalise=renormalise)

    assert torch.equal(chosen, experts_expected)
    torch.testing.assert_close(weights.double(), expected, rtol=3e-6, atol=1e-9)


def test_ties_go_to_the_lower_expert() -> None:
    """Of equal logits the lower expert comes first, also at the cut."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 2.0], [0.0] * 6])
    weights, chosen = route(logits, 3)

    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_bfloat16_logits_give_bfloat16_weights() -> None:
    """The softmax is float32 and only the weights are rounded."""
    logits = gaussian(20, 16, seed=2).bfloat16()
    weights, chosen = route(logits, 4)
    expected, experts_expected = route_reference(logits, 4)

    assert weights.dtype == torch.bfloat16
    assert torch.equal(chosen, experts_expected)
    torch.testing.assert_close(weights, expected, rtol=2**-7, atol=0)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    """Routing one token is routing it among others."""
    logits = gaussian(16, 64, seed=3)
    weights, chosen = route(logits, 8)
    for row in range(16):
        alone = route(logits[row : row + 1], 8)

        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], chosen[row])


def test_nan_and_infinity_stay_in_range() -> None:
    """A row with a NaN has NaN weights and legal experts; its neighbours are unharmed."""
    logits = gaussian(3, 8, seed=4)
    logits[1, 5] = float("nan")
    weights, chosen = route(logits, 3)

    assert bool(weights[1].isnan().all())
    assert bool(((chosen >= 0) & (chosen < 8)).all())
    assert torch.equal(weights[::2], route(logits[::2], 3)[0])


def test_bad_input_is_refused() -> None:
    """Too many experts asked for, a missing axis or a strange type are named."""
    with pytest.raises(BadShape):
        route(torch.zeros(2, 4), 5)
    with pytest.raises(BadShape):
        route(torch.zeros(4), 2)
    with pytest.raises(BadDtype):
        route(torch.zeros(2, 4, dtype=torch.float64), 2)
    assert route(torch.zeros(0, 4), 2)[1].shape == (0, 2)


@pytest.mark.slow
def test_route_agrees_with_transformers() -> None:
    """transformers' router on the tiny checkpoint chooses the same experts with the same weights."""
    gate = tiny_model().model.layers[1].mlp.gate
    with torch.no_grad():
        logits, scores, experts = gate(gaussian(200, 64, seed=5))
    weights, chosen = route(logits, gate.top_k, renormalise=gate.norm_topk_prob)

    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(weights, scores, rtol=1e-6, atol=0)
