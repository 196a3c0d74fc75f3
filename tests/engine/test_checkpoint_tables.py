"""The places of a checkpoint's PLE tables give a backend the rows that transformers reads."""

from __future__ import annotations

import pytest
import torch

import oracle
from stallwatch.heartbeat import Board
from stallwatch_engine.checkpoint.errors import BadCheckpoint
from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.table_spec import table_spec
from stallwatch_engine.checkpoint.tiny import make_tiny, tiny_settings
from stallwatch_engine.checkpoint.view import CheckpointView
from stallwatch_engine.checkpoint.write import Recipe, write_checkpoint
from stallwatch_engine.ple.tables import load


def spec_of(folder):
    with CheckpointView.open(folder) as view:
        return table_spec(view, dtype="float32")


@pytest.mark.slow
def test_rows_are_those_of_the_reference(tmp_path):
    """Hashing and gathering through these places gives transformers' n-gram embeddings, bit for bit."""
    model = oracle.tiny_model()
    model.save_pretrained(tmp_path)
    source = load(spec_of(tmp_path), Board(None, "worker", 0, 0).lane("ple"))
    ids = torch.randint(0, 272, (50,), generator=torch.Generator().manual_seed(1))
    ids[[7, 8, 30]] = oracle.EOS
    out = torch.empty(2, 50, 64)

    source.gather(
        ids.to(torch.int32),
        torch.tensor([0, 50], dtype=torch.int32),
        torch.full((1, 2), oracle.EOS, dtype=torch.int32),
        out,
    )

    for ordinal, layer in enumerate((0, 2)):
        embedding = model.model.layers[layer].ple.ple_embedding
        with torch.no_grad():
            expected = embedding(ids[None], None)
        assert torch.equal(out[ordinal], expected.reshape(50, 64))


def test_the_same_tables_in_other_files(tmp_path):
    """However the weights are cut into files the tables are the same; another seed makes other ones."""
    make_tiny(tmp_path / "one")
    make_tiny(tmp_path / "other", seed=1)
    write_checkpoint(tmp_path / "cut", Recipe(tiny_settings(), file_bytes=300_000))

    one, other, cut = (spec_of(tmp_path / name) for name in ("one", "other", "cut"))

    assert one.fingerprint() == cut.fingerprint()
    assert one.fingerprint() != other.fingerprint()
    assert [layer.name for layer in one.layers] == ["model.layers.0.ple", "model.layers.2.ple"]
    ple = parse_config(tiny_settings()).ple
    assert [layer.rows for layer in one.layers] == [ple.layout(n).padded_rows for n in (0, 2)]


def test_no_tables(tmp_path):
    """A model without PLE layers has no tables."""
    write_checkpoint(tmp_path / "none", Recipe({**tiny_settings(), "ple_layer_ids": []}))
    assert spec_of(tmp_path / "none") is None


def test_parts_of_two_types(tmp_path):
    """A table whose parts are stored in different types is refused by the part's name."""
    from safetensors.torch import load_file, save_file

    make_tiny(tmp_path / "mixed")
    file = tmp_path / "mixed" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.ple.ple_embedding.ngram_embedding.shard_5.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(BadCheckpoint) as caught:
        spec_of(tmp_path / "mixed")
    assert caught.value.tensor == name
