"""What is written is what transformers reads, and the same settings give the same bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

from stallwatch_engine.checkpoint.bench import BENCH_SHA256, bench_settings, config_sha256
from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.tiny import make_tiny, tiny_settings
from stallwatch_engine.checkpoint.tokenizer import EOS, PAD, VOCAB
from stallwatch_engine.checkpoint.view import CheckpointView
from stallwatch_engine.checkpoint.write import (
    FolderInUse,
    Recipe,
    parameter_count,
    write_checkpoint,
)
from stallwatch_engine.cli import engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.slow
def test_transformers_loads_it_without_a_key_too_many_or_too_few(tiny):
    """The reference implementation finds every weight it wants, none it does not, and tells our logits."""
    from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

    model, told = Qwen4ExpForCausalLM.from_pretrained(
        tiny, output_loading_info=True, attn_implementation="sdpa"
    )

    assert not any(told.values()), told
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, EOS, 4] * 20])).logits
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10  # neither dead nor exploding


@pytest.mark.slow
def test_stored_tensors_are_those_of_the_reference(tiny):
    """A model saved by transformers with our settings holds our names and shapes, no others."""
    import oracle

    config = oracle.tiny_config()
    saved = tiny.parent / "saved"
    oracle.tiny_model().save_pretrained(saved)
    with CheckpointView.open(saved) as theirs, CheckpointView.open(tiny) as ours:
        assert {n: i.shape for n, i in theirs.tensors.items()} == {
            n: i.shape for n, i in ours.tensors.items()
        }
        assert theirs.config == ours.config
    assert config.max_position_embeddings == 16384


@pytest.mark.slow
def test_tokenizer_and_template_load_in_transformers(tiny):
    """AutoTokenizer reads the files: one token a byte, the specials where the config says, a chat template."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(tiny)

    text = "Grüße, 世界 \n<|im_start|>"
    ids = found(text).input_ids
    assert len(ids) == len(text.removesuffix("<|im_start|>").encode()) + 1
    assert found.decode(ids) == text
    assert (found.eos_token_id, found.pad_token_id, len(found)) == (EOS, PAD, VOCAB)
    chat = [{"role": "user", "content": "hi"}]
    prompt = found.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "user: hi\nassistant:"


def test_any_bytes_survive_the_tokenizer(tiny):
    """Encoding, then decoding, gives the text back, also beyond ASCII."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))

    text = "".join(map(chr, range(1, 0x250))) + "🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_same_seed_same_bytes(tiny, tmp_path):
    """Two folders from one seed are equal file by file; another seed changes the weights alone."""
    make_tiny(tmp_path / "again")
    make_tiny(tmp_path / "other", seed=1)

    first, again, other = digests(tiny), digests(tmp_path / "again"), digests(tmp_path / "other")
    assert first == again
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {"model.safetensors", "stallwatch_recipe.json"}


def test_cut_into_files_holds_the_same_weights(tiny, tmp_path):
    """A checkpoint in several files with an index reads like the one in a single file."""
    written = write_checkpoint(
        tmp_path / "cut", Recipe(tiny_settings(), seed=0, file_bytes=400_000)
    )

    assert len(list(written.folder.glob("*.safetensors"))) > 4
    with CheckpointView.open(written.folder) as cut, CheckpointView.open(tiny) as whole:
        assert set(cut.tensors) == set(whole.tensors)
        for name in whole.tensors:
            assert torch.equal(cut.read(name), whole.read(name)), name


def test_written_once(tmp_path):
    """A second call finds the finished checkpoint; other settings never overwrite it."""
    first = make_tiny(tmp_path / "tiny")
    second = make_tiny(tmp_path / "tiny")

    assert (first.existed, second.existed) == (False, True)
    with pytest.raises(FolderInUse, match="holds another checkpoint"):
        make_tiny(tmp_path / "tiny", seed=5)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(FolderInUse):
        make_tiny(tmp_path / "foreign")


def test_a_failed_write_leaves_nothing(tmp_path):
    """An error in the middle leaves neither the folder nor a scratch folder beside it."""

    def full(name: str) -> None:
        if "layers.2" in name:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path / "tiny", Recipe(tiny_settings()), progress=full)

    assert list(tmp_path.iterdir()) == []


def test_bench_model_is_fixed():
    """The bench settings hash to the published number and have about 78 million parameters."""
    config = parse_config(bench_settings())

    assert config_sha256(bench_settings()) == BENCH_SHA256
    assert 77e6 < parameter_count(config) < 79e6
    assert (config.hidden, len(config.layers), config.moe.experts) == (512, 8, 16)
    assert (config.moe.top_k, config.moe.width, config.vocab) == (4, 256, 272)


@pytest.mark.slow
def test_bench_checkpoint_is_what_its_config_asks_for(tmp_path):
    """`make-bench` writes a checkpoint that opens."""
    result = CliRunner().invoke(engine, ["make-bench", str(tmp_path / "bench")])

    assert result.exit_code == 0, result.output
    with CheckpointView.open(tmp_path / "bench") as view:
        assert view.config == parse_config(bench_settings())


def test_command_line(tmp_path):
    """`make-tiny` says what it wrote, says so when it was there, and refuses a foreign folder with exit 1."""
    run = CliRunner().invoke
    folder = str(tmp_path / "t")

    first = run(engine, ["make-tiny", folder])
    second = run(engine, ["make-tiny", folder])
    third = run(engine, ["make-tiny", folder, "--seed", "3"])

    assert (first.exit_code, second.exit_code, third.exit_code) == (0, 0, 1)
    assert "now holds 634,096 parameters" in first.output
    assert "already holds" in second.output
    assert "name a new folder" in third.output


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    """A file where a folder must be made: exit 1 with its name, no traceback, and it is unchanged."""
    (tmp_path / "file").write_text("mine")

    for command in ("make-tiny", "make-bench"):
        result = CliRunner().invoke(engine, [command, str(tmp_path / "file" / "t")])
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert f"cannot write {tmp_path}/file/t: " in result.output
    assert (tmp_path / "file").read_text() == "mine"


def test_every_flag_of_serve_says_what_it_is():
    """An operator reads the help instead of the source."""
    assert [o.name for o in engine.commands["serve"].params if not o.help] == []


def test_bfloat16(tmp_path):
    """The same weights, rounded, in half the bytes; the hash numbers stay int64."""
    make_tiny(tmp_path / "a")
    make_tiny(tmp_path / "b", dtype="bfloat16")

    with CheckpointView.open(tmp_path / "a") as a, CheckpointView.open(tmp_path / "b") as b:
        for name, info in b.tensors.items():
            expected = a.read(name)
            if info.dtype != "I64":
                expected = expected.to(torch.bfloat16)
            assert torch.equal(b.read(name), expected), name
