"""The tensors behind pages and slots, on one device.

Everything is zeroed when its index is handed to another request: a page by `clear_pages`, a slot by
`begin`. Both are enqueued like any other work, before the step that uses the index first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from stallwatch_engine.checkpoint.config import LayerKind, ModelConfig
from stallwatch_engine.schedule.plan import StepPlan
from stallwatch_engine.state.context import TokenContext
from stallwatch_engine.state.pages import PageTables

KV_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
MODEL_DTYPES: Final = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Sizes and types. An E4M3 cache means code times scale; the indexer's caches keep the model's type."""

    slots: int
    pages: int
    page_size: int
    max_pages: int  # of one request
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def check(self, config: ModelConfig) -> None:
        """ValueError for what this model's caches cannot be."""
        if self.dtype not in MODEL_DTYPES or self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"no stores in {self.dtype} with keys and values in {self.kv_dtype}")
        if self.slots < 1 or not 1 <= self.max_pages <= self.pages:
            raise ValueError(
                f"{self.slots} slots and {self.pages} pages hold no request of {self.max_pages} pages"
            )
        if self.page_size < 1 or self.page_size % config.qsa.ratio:
            raise ValueError(
                f"page_size {self.page_size} must be a multiple of the {config.qsa.ratio} tokens of a block"
            )


@dataclass(frozen=True, slots=True)
class QsaStore:
    """One sparse-attention layer."""

    k: torch.Tensor  # [pages, page, Hkv, D] in kv_dtype
    v: torch.Tensor  # the same
    index: torch.Tensor  # [pages, page / ratio, di]: one compressed key for each complete block
    ring: torch.Tensor  # [slots, ratio, di]: raw keys of the open block, at position % ratio


@dataclass(frozen=True, slots=True)
class GdnStore:
    """One GatedDeltaNet layer, and its PLE convolution if it has one. Rows are oldest first."""

    conv: torch.Tensor  # [slots, kernel - 1, channels]
    recurrent: torch.Tensor  # float32[slots, Hv, dk, dv]
    ple_conv: torch.Tensor | None  # [slots, (kernel - 1) * ngram, S * H]


class StateStores:
    """All stores of a model. `layers[i]` is that of decoder layer i."""

    def __init__(self, config: ModelConfig, spec: StoreSpec) -> None:
        spec.check(config)
        self.spec = spec
        self._by_page: list[torch.Tensor] = []  # [layers, pages, ...]
        self._by_slot: list[torch.Tensor] = []  # [layers, slots, ...]
        qsa = iter(self._qsa(config))
        gdn = iter(self._gdn(config))
        self.layers: tuple[QsaStore | GdnStore, ...] = tuple(
            next(qsa) if kind is LayerKind.QSA else next(gdn) for kind in config.layers
        )
        self.tables = PageTables(spec.slots, spec.max_pages, spec.device)
        ple = config.ple
        self.context = (
            None
            if ple is None
            else TokenContext(spec.slots, ple.context, eos=ple.numbers.eos, device=spec.device)
        )

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        stores = (*self._by_page, *self._by_slot, self.tables.entries)
        held = sum(int(each.nbytes) for each in stores)
        return held + (int(self.context.ids.nbytes) if self.context is not None else 0)

    def prepare(self, plan: StepPlan) -> None:
        """Make the stores what the step expects: on the stream that runs it, before it, in step order."""
        self.begin(plan.fresh)
        self.clear_pages([write.page for write in plan.page_writes])
        self.tables.apply(plan.page_writes)

    def begin(self, slots: Sequence[int]) -> None:
        """Requests start at position 0 in these slots: nothing of earlier ones may be left."""
        if not slots:
            return
        where = torch.tensor(slots, dtype=torch.int64, device=self.spec.device)
        for store in self._by_slot:
            store.index_fill_(1, where, 0)
        self.tables.clear(slots)
        if self.context is not None:
            self.context.begin(where)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """These pages go to requests that have not written them yet."""
        if not pages:
            return
        where = torch.tensor(pages, dtype=torch.int64, device=self.spec.device)
        for store in self._by_page:
            # as bytes: zero has no bits in any of the types, and E4M3 knows no fill everywhere
            store.view(torch.uint8).index_fill_(1, where, 0)

    def _paged(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        store = torch.zeros(shape, dtype=dtype, device=self.spec.device)
        self._by_page.append(store)
        return store

    def _slotted(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        store = torch.zeros(shape, dtype=dtype, device=self.spec.device)
        self._by_slot.append(store)
        return store

    def _qsa(self, config: ModelConfig) -> list[QsaStore]:
        spec, qsa = self.spec, config.qsa
        layers = len(config.layers_of(LayerKind.QSA))
        keys = layers, spec.pages, spec.page_size, qsa.kv_heads, qsa.head_dim
        blocks = spec.page_size // qsa.ratio
        k = self._paged(*keys, dtype=spec.kv_dtype)
        v = self._paged(*keys, dtype=spec.kv_dtype)
        index = self._paged(layers, spec.pages, blocks, qsa.index_dim, dtype=spec.dtype)
        ring = self._slotted(layers, spec.slots, qsa.ratio, qsa.index_dim, dtype=spec.dtype)
        return [QsaStore(k[i], v[i], index[i], ring[i]) for i in range(layers)]

    def _gdn(self, config: ModelConfig) -> list[GdnStore]:
        spec, gdn, ple = self.spec, config.gdn, config.ple
        layers = config.layers_of(LayerKind.GDN)
        rows = gdn.conv_kernel - 1
        conv = self._slotted(len(layers), spec.slots, rows, gdn.channels, dtype=spec.dtype)
        state = gdn.value_heads, gdn.key_dim, gdn.value_dim
        recurrent = self._slotted(len(layers), spec.slots, *state, dtype=torch.float32)
        convs: dict[int, torch.Tensor] = {}
        if ple is not None:
            wide = len(ple.layers), spec.slots, ple.conv_rows, config.residual
            convs = dict(zip(ple.layers, self._slotted(*wide, dtype=spec.dtype), strict=True))
        return [GdnStore(conv[i], recurrent[i], convs.get(layer)) for i, layer in enumerate(layers)]
