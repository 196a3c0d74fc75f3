"""Shapes are the kernels', and nothing of one request is ever found by the next."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.tiny import tiny_settings
from stallwatch_engine.state.context import TokenContext
from stallwatch_engine.state.pages import NULL
from stallwatch_engine.state.stores import GdnStore, QsaStore, StateStores, StoreSpec

CONFIG = parse_config(tiny_settings())
EOS = 257
KV = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def stores(**changes) -> StateStores:
    return StateStores(
        CONFIG, StoreSpec(**{"slots": 3, "pages": 5, "page_size": 8, "max_pages": 4, **changes})
    )


def tensors(held: StateStores) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of every layer, with whether it is by page or by slot."""
    found: list[tuple[str, torch.Tensor]] = []
    for layer in held.layers:
        if isinstance(layer, QsaStore):
            found += [("page", layer.k), ("page", layer.v), ("page", layer.index)]
            found += [("slot", layer.ring)]
        else:
            found += [("slot", layer.conv), ("slot", layer.recurrent)]
            found += [("slot", layer.ple_conv)] if layer.ple_conv is not None else []
    return found


def soil(held: StateStores) -> None:
    """A canary in every byte: no zero byte is left anywhere."""
    for _, tensor in tensors(held):
        tensor.view(torch.uint8).fill_(0x3B)
    held.context.ids.fill_(99)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_types(kv, dtype):
    """Layers get the store of their kind, in the layout that the kernels read."""
    held = stores(kv_dtype=kv, dtype=dtype)
    first, second = held.layers[:2]

    assert [type(layer) for layer in held.layers] == [GdnStore, QsaStore] * 2
    assert second.k.shape == second.v.shape == (5, 8, 2, 32)
    assert second.k.dtype == kv
    assert (second.index.shape, second.index.dtype) == ((5, 2, 16), dtype)
    assert (second.ring.shape, second.ring.dtype) == ((3, 4, 16), dtype)
    assert (first.conv.shape, first.conv.dtype) == ((3, 3, 128), dtype)
    assert (first.recurrent.shape, first.recurrent.dtype) == ((3, 4, 16, 16), torch.float32)
    assert (first.ple_conv.shape, first.ple_conv.dtype) == ((3, 9, 256), dtype)
    assert all(tensor.is_contiguous() for _, tensor in tensors(held))
    total = sum(tensor.nbytes for _, tensor in tensors(held)) + held.context.ids.nbytes
    assert held.nbytes == total + held.tables.entries.nbytes


@pytest.mark.parametrize("kv", KV)
def test_a_reused_page_holds_nothing(kv):
    """Canaries everywhere; the pages handed out are zero in every layer, every other byte is untouched."""
    held = stores(kv_dtype=kv)
    soil(held)

    held.clear_pages([1, 4])

    for kind, tensor in tensors(held):
        if kind == "slot":
            assert (as_bytes(tensor) == 0x3B).all()
            continue
        assert not as_bytes(tensor[[1, 4]].contiguous()).any()
        assert (as_bytes(tensor[[0, 2, 3]].contiguous()) == 0x3B).all()


def test_a_reused_slot_holds_nothing():
    """Canaries everywhere; the slot that begins is zero in every state and at end tokens in its context."""
    held = stores(dtype=torch.bfloat16)
    soil(held)

    held.begin([2])

    for kind, tensor in tensors(held):
        if kind == "page":
            assert (as_bytes(tensor) == 0x3B).all()
            continue
        assert not as_bytes(tensor[2]).any()
        assert (as_bytes(tensor[:2]) == 0x3B).all()
    assert held.context.ids[:3].tolist() == [[99, 99], [99, 99], [EOS, EOS]]


def test_layers_share_nothing():
    """Writing one layer's stores changes no other layer's."""
    held = stores()
    for number, (_, tensor) in enumerate(tensors(held)):
        tensor.fill_(number + 1)
    for number, (_, tensor) in enumerate(tensors(held)):
        assert (tensor == number + 1).all()


def test_nothing_to_clear():
    """Empty lists touch nothing."""
    held = stores()
    soil(held)
    held.begin([])
    held.clear_pages([])
    assert all((as_bytes(tensor) == 0x3B).all() for _, tensor in tensors(held))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 6}, "multiple of the 4 tokens"),
        ({"page_size": 0}, "multiple"),
        ({"slots": 0}, "0 slots"),
        ({"max_pages": 6}, "of 6 pages"),
        ({"kv_dtype": torch.float16}, "float16"),
        ({"dtype": torch.float8_e4m3fn}, "float8"),
    ],
)
def test_stores_that_cannot_be(change, named):
    """Sizes and types that the model's caches cannot have are refused when they are made."""
    with pytest.raises(ValueError, match=named):
        stores(**change)


def test_no_ple_no_context():
    """A model without n-gram layers has neither contexts nor their convolution states."""
    held = StateStores(
        parse_config({**tiny_settings(), "ple_layer_ids": None}),
        StoreSpec(slots=1, pages=1, page_size=4, max_pages=1),
    )
    assert held.context is None
    assert held.layers[0].ple_conv is None


@given(
    older=st.integers(1, 4),
    history=st.lists(
        st.lists(st.lists(st.integers(0, 271), max_size=6), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
)
def test_context_is_the_tail_of_the_history(older, history):
    """However a request is cut into steps, its context is the last ids of what was appended, after end tokens."""
    context = TokenContext(3, older, eos=EOS)
    expected = {slot: [EOS] * older for slot in range(3)}
    for step in history:
        rows = list(enumerate(step))  # row r in slot 2 - r, and a padding row at the end
        slots = torch.tensor([2 - row for row, _ in rows] + [NULL])
        ids = [token for _, tokens in rows for token in tokens] + [5]
        starts = [0]
        for row, tokens in rows:
            starts.append(starts[-1] + len(tokens))
            expected[2 - row] += tokens
        starts.append(len(ids))
        context.advance(slots, torch.tensor(starts, dtype=torch.int32), torch.tensor(ids))
        out = torch.empty(len(slots) - 1, older, dtype=torch.int32)
        context.rows(slots[:-1], out)
        assert out.tolist() == [expected[2 - row][-older:] for row, _ in rows]
    assert context.ids[:3].tolist() == [expected[slot][-older:] for slot in range(3)]
