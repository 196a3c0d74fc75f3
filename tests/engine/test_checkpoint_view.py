"""A bad checkpoint is refused in one sentence that names tensor and file; a good one is read lazily."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stallwatch_engine.checkpoint.errors import BadCheckpoint, UnsupportedModel
from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.tiny import make_tiny, tiny_settings
from stallwatch_engine.checkpoint.view import CheckpointView
from stallwatch_engine.checkpoint.weights import GdnWeights, QsaWeights, load_weights
from stallwatch_engine.checkpoint.write import Recipe, write_checkpoint

PLE = "model.layers.2.ple.ple_embedding"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / "tiny"
    make_tiny(folder)
    return folder


@pytest.fixture
def copy(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(folder, change):
    """Rewrite the weights after `change(tensors)`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(folder) -> BadCheckpoint:
    with pytest.raises(BadCheckpoint) as caught:
        CheckpointView.open(folder)
    assert "\n" not in str(caught.value)
    return caught.value


def test_missing_tensor(copy):
    """A tensor that the configuration asks for and no file holds is named with the file."""
    edit(copy, lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"))

    error = refusal(copy)

    assert error.tensor == "model.layers.1.self_attn.k_norm.weight"
    assert error.file.endswith("model.safetensors")
    assert str(error).endswith("is missing")


def test_wrong_shape(copy):
    """A misshapen tensor is refused with both shapes."""
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    edit(copy, lambda t: t.update({name: torch.zeros(32, 64)}))

    assert "[32, 64]; the configuration asks for [64, 32]" in str(refusal(copy))


def test_surplus_tensor(copy):
    """A tensor that would be ignored (a scale, another layer) is refused, not ignored."""
    edit(copy, lambda t: t.update({"model.layers.0.mlp.gate.weight_scale": torch.ones(1)}))

    assert refusal(copy).tensor == "model.layers.0.mlp.gate.weight_scale"


@pytest.mark.parametrize(
    ("buffer", "place"),
    [("layer_multipliers", 1), ("ngram_heads_vocab_sizes", 7), ("ngram_heads_offsets", 4)],
)
def test_wrong_hash_numbers(copy, buffer, place):
    """One changed number in a stored hash buffer is found, and the buffer named."""
    name = f"{PLE}.{buffer}"
    edit(copy, lambda t: t[name].__setitem__(place, t[name][place] + 2))

    error = refusal(copy)

    assert error.tensor == name
    assert f"at {place}" in error.problem


def test_wrong_type(copy):
    """Weights as integers, or hash numbers as floats, are refused."""
    name = f"{PLE}.layer_multipliers"
    edit(copy, lambda t: t.update({name: t[name].float()}))
    assert "F32; expected I64" in str(refusal(copy))


def test_unreadable_format(copy):
    """A storage format that is not read here is named, with those that are."""
    name = "lm_head.weight"
    edit(copy, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))

    error = refusal(copy)

    assert error.tensor == name
    assert "F8_E4M3" in str(error)
    assert "BF16" in str(error)


@pytest.mark.parametrize("left", [0.0, 0.001, 0.3, 0.999])
def test_truncated_file(copy, left):
    """A file that was cut off is refused at every length; past the header, the first lost tensor is named."""
    file = copy / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * left)])

    error = refusal(copy)

    assert error.file == str(file)
    assert "cut off" in str(error)
    assert bool(error.tensor) == (left > 0.1)


def test_header_of_lies(copy):
    """A header whose byte ranges contradict its shapes is refused before anything is mapped."""
    file = copy / "model.safetensors"
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header["lm_head.weight"]["shape"] = [272, 63]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    assert refusal(copy).tensor == "lm_head.weight"


@pytest.mark.parametrize("number", [math.inf, math.nan, 64.0, "64", True, None, [64]])
@pytest.mark.parametrize("field", ["shape", "data_offsets"])
def test_header_of_numbers_that_are_none(copy, field, number):
    """Where a size belongs stands something else that JSON can write: named, never converted."""
    file = copy / "model.safetensors"
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header["lm_head.weight"][field][0] = number
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight has a damaged header entry"):
        CheckpointView.open(copy)


def test_index_that_points_nowhere(tiny, tmp_path):
    """An index naming an absent file, an absent tensor or a file outside is refused."""
    folder = tmp_path / "cut"
    write_checkpoint(folder, Recipe(tiny_settings(), file_bytes=400_000))
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_bytes())

    def with_place(name, file):
        changed = {**good, "weight_map": {**good["weight_map"], name: file}}
        index.write_text(json.dumps(changed))
        return refusal(folder)

    assert "cannot be read" in str(with_place("lm_head.weight", "model-9.safetensors"))
    first = good["weight_map"]["model.embed_tokens.weight"]
    assert with_place("lm_head.weight", first).tensor == "lm_head.weight"
    assert "outside of the folder" in str(with_place("lm_head.weight", "../x.safetensors"))
    index.write_text("[]")
    assert "no index" in str(refusal(folder))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff\xfe"])
def test_broken_config(copy, raw):
    """A config.json that is no JSON object is refused by file name."""
    (copy / "config.json").write_bytes(raw)
    assert refusal(copy).file.endswith("config.json")


def test_absent_folder(tmp_path):
    """No folder at all is the same kind of error."""
    assert "config.json: cannot be read" in str(refusal(tmp_path / "none"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["Qwen4ExpForConditionalGeneration"]}, "ConditionalGeneration"),
        ({"model_type": "qwen4_exp"}, "model_type 'qwen4_exp'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"output_gate_type": "tanh"}, "output_gate_type"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads=2"),
        ({"dtype": "float64"}, "float64"),
        ({"layer_types": ["linear_attention", "mamba"] * 2}, "mamba"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_unsupported_by_name(change, named):
    """What this engine does not do is refused by its name, never ignored."""
    with pytest.raises(UnsupportedModel) as caught:
        parse_config({**tiny_settings(), **change})
    assert named in caught.value.feature


@pytest.mark.parametrize(
    "change",
    [
        {"ple_embed_dim": 60},
        {"hc_count": 1},
        {"indexer_budget": 33},
        {"indexer_head_dim": 8},
        {"indexer_n_heads": None},
        {"num_experts_per_tok": 9},
        {"ple_layer_ids": [2]},
        {"ple_layer_ids": [5]},
        {"ple_layer_ids": [0]},
        {"ple_layer_ids": "1"},
        {"eos_token_id": None},
        {"eos_token_id": 272},
        {"layer_types": ["linear_attention"]},
        {"linear_num_value_heads": 3},
        {"num_attention_heads": 3},
        {"hidden_size": 0},
        {"hidden_size": True},
        {"rms_norm_eps": float("nan")},
        {"norm_topk_prob": "yes"},
    ],
)
def test_contradictions(change):
    """Every constraint of the architecture is checked when the configuration is read."""
    with pytest.raises(BadCheckpoint) as caught:
        parse_config({**tiny_settings(), **change})
    assert not isinstance(caught.value, UnsupportedModel)


def test_released_spellings():
    """'full_attention' means indexed attention; the end tokens may be a list whose first cuts n-grams."""
    config = parse_config(
        {
            **tiny_settings(),
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "eos_token_id": [257, 259],
        }
    )

    assert config.layers == parse_config(tiny_settings()).layers
    assert config.eos == (257, 259)
    assert config.ple is not None
    assert config.ple.numbers.eos == 257


def test_table_parts_cover_the_rows(tiny):
    """The parts of a PLE table follow each other without gap and end at its padded size; slices are exact."""
    with CheckpointView.open(tiny) as view:
        table = view.table(2)
        ends = [part.first + part.rows for part in table.parts]
        assert [part.first for part in table.parts] == [0, *ends[:-1]]
        assert ends[-1] == table.layout.padded_rows
        part = table.parts[3]
        rows = view.read_rows(part.info.name, 5, 9)
        with part.info.path.open("rb") as file:
            file.seek(part.info.offset + 5 * 8 * 4)
            raw = file.read(4 * 8 * 4)
        assert rows.numpy().tobytes() == raw
        with pytest.raises(KeyError):
            view.table(1)
        with pytest.raises(IndexError):
            view.read_rows(part.info.name, 0, part.rows + 1)


def test_weights_by_layer(tiny):
    """Weights come out typed by layer, experts stacked, each tensor announced with growing totals."""
    told = []
    with CheckpointView.open(tiny) as view:
        weights = load_weights(view, dtype=torch.float32, progress=told.append)
        up = view.read("model.layers.3.mlp.experts.5.up_proj.weight")
        gate = view.read("model.layers.3.mlp.experts.5.gate_proj.weight")

    assert [type(layer.mixer) for layer in weights.layers] == [GdnWeights, QsaWeights] * 2
    assert [layer.ple is not None for layer in weights.layers] == [True, False, True, False]
    assert torch.equal(weights.layers[3].moe.gate_up[5], torch.cat([gate, up]))
    assert [each.tensors for each in told] == list(range(1, len(told) + 1))
    assert told[-1].tensors == told[-1].tensors_total
    assert told[-1].nbytes == told[-1].nbytes_total
    assert not any("ngram_embedding" in each.tensor for each in told)


def test_weights_outlive_the_file(copy):
    """Loaded weights are copies: removing or changing the file afterwards does not reach them."""
    with CheckpointView.open(copy) as view:
        weights = load_weights(view, dtype=torch.float32)
    before = weights.embed.clone()
    with (copy / "model.safetensors").open("r+b") as file:
        file.write(bytes(2_000_000))
    assert torch.equal(weights.embed, before)


def test_tied_embeddings(tmp_path):
    """With tied embeddings no head is stored, and the head is the embedding itself."""
    settings = {**tiny_settings(), "tie_word_embeddings": True}
    write_checkpoint(tmp_path / "tied", Recipe(settings))
    with CheckpointView.open(tmp_path / "tied") as view:
        weights = load_weights(view, dtype=torch.float32)
    assert weights.head is weights.embed
    assert "lm_head.weight" not in view.tensors
