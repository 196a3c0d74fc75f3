"""Small PLE tables of every format on disk, and packed steps that walk over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from stallwatch_engine.ple.shape import PleShape
from stallwatch_engine.ple.spec import LayerTable, Part, Place, TableSpec
from stallwatch_kernels.ple.layout import NgramNumbers, ngram_layout
from stallwatch_kernels.ple.table import Format

EOS = 257
VOCAB = 272
NUMBERS = {
    "vocab_size": VOCAB,
    "embed_dim": 256,  # 8 heads of 32: two groups of 16
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "vocab_base": 101,
    "eos": EOS,
    "divisible_by": 16,
    "seed": 1234,
    "parts": 3,
}
SCALES = {Format.INT8: "float32", Format.INT4: "float16", Format.NVFP4: "float8_e4m3"}


def spec(folder: Path, *formats: Format, seed: int = 0, dtype: str = "float32") -> TableSpec:
    """One random table per format, in three parts each (none given: fp32 twice). Formats that have one get a factor of their own per part."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tables = []
    for ordinal, fmt in enumerate(formats or (Format.FP32, Format.FP32)):
        parts = []
        shard_rows = ngram_layout(NgramNumbers(**NUMBERS), ordinal).shard_rows()
        for number, rows in enumerate(shard_rows):
            stem = folder / f"{fmt}-{ordinal}-{number}"
            scales = (
                _put(stem.with_suffix(".scales"), _scales(fmt, rows, random))
                if fmt in SCALES
                else None
            )
            codes = _put(stem.with_suffix(".codes"), _codes(fmt, rows, random))
            parts.append(Part(rows, codes, scales, 0.5 + number / 8 if fmt.scaled else 1.0))
        tables.append(
            LayerTable(
                f"layers.{ordinal}", ordinal, str(fmt), tuple(parts), 16, SCALES.get(fmt, "")
            )
        )
    return TableSpec(NUMBERS, dtype, tuple(tables))


def shape(of: TableSpec, *, max_tokens: int = 64, max_requests: int = 4, in_flight=2) -> PleShape:
    return PleShape(
        layers=tuple(layer.name for layer in of.layers),
        embed=of.ngram.embed_dim,
        ngram=of.ngram.ngram_size,
        dtype=of.dtype,
        max_tokens=max_tokens,
        max_requests=max_requests,
        max_in_flight=in_flight,
    )


def step(seq: int, *, tokens: int | None = None, requests: int | None = None):
    """(ids, query_start_loc, context) that no other step has, placeholders and end tokens among them."""
    random = np.random.default_rng(1000 + seq)
    tokens = tokens or int(random.integers(1, 48))
    requests = requests or int(min(tokens, random.integers(1, 5)))
    ids = torch.from_numpy(random.integers(0, VOCAB, tokens, dtype=np.int32))
    ids[random.random(tokens) < 0.1] = EOS
    ids[random.random(tokens) < 0.1] = -1
    cuts = np.sort(random.choice(np.arange(1, tokens), requests - 1, replace=False))
    starts = torch.tensor([0, *cuts.tolist(), tokens], dtype=torch.int32)
    context = torch.from_numpy(random.integers(0, VOCAB, (requests, 2), dtype=np.int32))
    return ids, starts, context


def rows_of(source, of: PleShape, seq: int) -> torch.Tensor:
    """The right answer for step(seq), from the source alone."""
    inputs = step(seq)
    out = torch.full((len(of.layers), len(inputs[0]), of.embed), torch.nan, dtype=of.torch_dtype)
    source.gather(*inputs, out)
    return out


def _put(path: Path, data: np.ndarray) -> Place:
    """The bytes in a file, behind a header that must be skipped."""
    path.write_bytes(b"header!!" + data.tobytes())
    return Place(str(path), 8, data.nbytes)


def _codes(fmt: Format, rows: int, random: np.random.Generator) -> np.ndarray:
    dim = NUMBERS["embed_dim"] // 8
    if fmt is Format.FP32:
        return random.standard_normal((rows, dim), dtype=np.float32)
    if fmt is Format.BF16:
        values = random.standard_normal((rows, dim), dtype=np.float32)
        return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    if fmt is Format.FP8:
        codes = random.integers(0, 256, (rows, dim), dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        return codes
    width = dim if fmt is Format.INT8 else dim // 2
    return random.integers(0, 256, (rows, width), dtype=np.uint8)


def _scales(fmt: Format, rows: int, random: np.random.Generator) -> np.ndarray:
    if fmt is Format.NVFP4:
        return random.integers(0x08, 0x70, (rows, 2), dtype=np.uint8)
    return random.uniform(0.01, 2, (rows, 2)).astype(SCALES[fmt])
