"""The model in plain torch, as an accelerator runs it, beside transformers and beside the compiled one."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

from engine_rig import rig
from oracle import stable_ties
from stallwatch_engine.checkpoint.tiny import make_tiny, tiny_settings
from stallwatch_engine.checkpoint.write import Recipe, write_checkpoint
from stallwatch_engine.model.forward import Forward
from stallwatch_engine.model.open import candidates
from stallwatch_engine.model.plain.forward import PlainForward
from stallwatch_kernels.admission import choose

LOGITS = 2e-5
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first one compiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path / "tiny")
    return path / "tiny"


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setenv("STALLWATCH_KERNEL_FORWARD", "torch")


def asked() -> dict[int, list[int]]:
    chance = random.Random(5)
    lengths = (1, 2, 9, 40, 77, 130)
    found = {n: [chance.randrange(256) for _ in range(length)] for n, length in enumerate(lengths)}
    found[3][10] = found[3][39] = 257
    return found


@pytest.mark.parametrize("options", [{}, {"max_chunk": 7}, {"runner": "mrv1"}])
def test_plain_torch_is_the_judges_model(folder, plain, options):
    """In a packed batch, whole or in chunks of seven, one step ahead or not: logits within 2e-5."""
    judge = Qwen4ExpForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with rig(folder, max_num_seqs=4, **options) as engine:
        assert isinstance(engine.executor.forward, PlainForward)
        for name, prompt in asked().items():
            engine.add(name, prompt, 6)
        engine.drain()
        for name, prompt in asked().items():
            tokens = engine.tokens[name]
            with stable_ties(), torch.inference_mode():
                rows = judge(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
            assert (rows - torch.stack(engine.logits[name])).abs().max() <= LOGITS
            assert rows.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("which", ["compiled", "torch"])
def test_a_sigmoid_gate_is_the_judges_too(tmp_path, monkeypatch, which):
    """output_gate_type=sigmoid, in both implementations: logits within 2e-5, and not those of a silu gate."""
    monkeypatch.setenv("STALLWATCH_KERNEL_FORWARD", which)
    for gate in ("silu", "sigmoid"):
        write_checkpoint(tmp_path / gate, Recipe({**tiny_settings(), "output_gate_type": gate}, 0))
    judge = Qwen4ExpForCausalLM.from_pretrained(
        tmp_path / "sigmoid", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    prompt = asked()[3]
    found = {}
    for gate in ("silu", "sigmoid"):
        with rig(tmp_path / gate) as engine:
            found[gate] = engine.alone(prompt, 6)
    tokens, logits = found["sigmoid"]
    with stable_ties(), torch.inference_mode():
        rows = judge(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    assert (rows - logits).abs().max() <= LOGITS
    assert (rows[0] - found["silu"][1][0]).abs().max() > 100 * LOGITS


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_both_round_the_caches_alike(folder, monkeypatch, kv_dtype):
    """Keys and values in fewer bits: the two implementations stay as near as in float32."""
    found = {}
    for which in ("compiled", "torch"):
        monkeypatch.setenv("STALLWATCH_KERNEL_FORWARD", which)
        with rig(folder, kv_dtype=kv_dtype) as engine:
            found[which] = engine.alone(asked()[4], 1)[1]
    # a value on a rounding edge may fall to either side: one step of the cache's type in few elements
    assert (found["compiled"] - found["torch"]).abs().max() <= 100 * LOGITS


def test_an_accelerator_gets_torch_and_a_cpu_the_kernels():
    """By admission, with the reason in words."""
    chosen = choose("forward", candidates(torch.device("cuda")), environ={})
    assert (chosen.impl, chosen.reason) == ("torch", "not compiled: its kernels run on the CPU")
    assert choose("forward", candidates(torch.device("cpu")), environ={}).impl == "compiled"


def test_the_compiled_one_runs_here(folder):
    """What every other test of the engine runs on."""
    with rig(folder, max_num_seqs=1) as engine:
        assert isinstance(engine.executor.forward, Forward)
