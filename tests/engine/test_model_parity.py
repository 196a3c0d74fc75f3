"""The engine beside transformers' Qwen4-Exp on the same files: every sampled row's logits."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

from engine_rig import rig
from oracle import stable_ties
from stallwatch_engine.checkpoint.tiny import make_tiny

LOGITS = 2e-5
GAP = 1e-5
EOS = 257
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first one compiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path / "tiny")
    return path / "tiny"


@pytest.fixture(scope="module")
def theirs(folder):
    return Qwen4ExpForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="module")
def engine(folder):
    torch.set_num_threads(1)
    with rig(folder, max_batched_tokens=256) as opened:
        yield opened


def prompts() -> dict[str, list[int]]:
    """32 random ones of 1 to 119 tokens, some with end tokens inside, and 3 far over the budget of 35."""
    chance = random.Random(7)
    found = {}
    for number in range(32):
        length = 1 if number == 0 else 2 if number == 1 else chance.randint(3, 119)
        ids = [chance.randrange(256) for _ in range(length)]
        for place in range(length):
            if chance.random() < 0.04:
                ids[place] = EOS
        found[f"random-{number}"] = ids
    for length in (184, 257, 400):
        found[f"long-{length}"] = [chance.randrange(256) for _ in range(length)]
    return found


def judged(model, prompt, tokens) -> torch.Tensor:
    """The judge's logits for each of the tokens, given those before it."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with stable_ties(), torch.inference_mode():
        return model(ids).logits[0, len(prompt) - 1 :]


def check(model, prompt, tokens, logits) -> tuple[float, int]:
    """Largest difference, and how often another token was taken where two were nearly equal."""
    theirs = judged(model, prompt, tokens)
    near = 0
    for token, row in zip(tokens, theirs, strict=True):
        top = row.topk(2)
        if top.indices[0] != token:
            gap = float(top.values[0] - row[token])
            assert gap < GAP, f"another token, {gap} below the best"
            near += 1
    return float((theirs - logits).abs().max()), near


def test_every_token_is_the_judges(engine, theirs, capsys):
    """35 prompts in one packed stream of steps: greedy tokens equal, logits within 2e-5."""
    asked = prompts()
    for name, prompt in asked.items():
        engine.add(name, prompt)
    engine.drain()
    worst, near = 0.0, 0
    for name, prompt in asked.items():
        assert len(engine.tokens[name]) == 16
        found = check(theirs, prompt, engine.tokens[name], torch.stack(engine.logits[name]))
        worst, near = max(worst, found[0]), near + found[1]
    with capsys.disabled():
        print(f"\n35 prompts: logits differ by at most {worst:.2g}; {near} tokens in near ties")  # noqa: T201
    assert worst <= LOGITS


@pytest.mark.parametrize("name", ["random-0", "random-1", "random-7", "long-184"])
def test_the_batch_around_a_request_does_not_change_a_bit(engine, name):
    """Alone, and between three others of other lengths that come and go: the same bits of logits."""
    asked = prompts()
    tokens, logits = engine.alone(asked[name])
    others = [p for other, p in asked.items() if other.startswith("random") and other != name]
    for number, prompt in enumerate(others[:5]):
        engine.add(("other", name, number), prompt, 3 + number)
    engine.add(("among", name), asked[name])
    engine.drain()
    assert engine.tokens["among", name] == tokens
    assert torch.equal(torch.stack(engine.logits["among", name]), logits)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 9, 10, 37])
def test_any_split_of_a_prompt_gives_the_same_bits(folder, engine, chunk):
    """Chunks of every size, borders at end tokens, prompts shorter than an n-gram: logits bitwise equal."""
    asked = prompts()
    chosen = {
        "eos": [5, EOS, 7, EOS, EOS, 9, 1, 2, EOS, 3, 4, EOS, 8],
        "one": asked["random-0"],
        "two": asked["random-1"],
        "long": asked["long-184"],
    }
    whole = {name: engine.alone(prompt, 6) for name, prompt in chosen.items()}
    with rig(folder, max_batched_tokens=64, max_chunk=chunk) as other:
        for name, prompt in chosen.items():
            other.add(name, prompt, 6)
        other.drain()
        for name, (tokens, logits) in whole.items():
            assert other.tokens[name] == tokens
            assert torch.equal(torch.stack(other.logits[name]), logits)


def zero(weight: torch.Tensor) -> None:
    weight.zero_()


def as_it_is(norm) -> None:
    norm.forward = lambda x: x


def without_tail(indexer) -> None:
    """Only complete groups may be read, except by the rows that have none."""
    original = indexer.forward

    def forward(hidden, positions, mask, past):
        chosen = original(hidden, positions, mask, past)
        rows = torch.arange(chosen.shape[-1])
        complete = (rows + 1) // indexer.compress_ratio * indexer.compress_ratio
        tail = (rows[None] >= complete[:, None]) & (complete[:, None] > 0)
        return chosen & ~tail

    indexer.forward = forward


def densely(indexer) -> None:
    indexer.block_topk = indexer.token_budget = 1 << 20


# What each mechanism's absence is, done to one module of the judge.
PLE = {
    "table": lambda m: zero(m.ple_embedding.ngram_embedding.weight),
    "third token of an n-gram": lambda m: zero(m.ple_embedding.layer_multipliers[2:]),
    "end tokens cut n-grams": lambda m: setattr(m.ple_embedding, "eos_token_id", 269),
    "ple gate": lambda m: zero(m.key_proj.weight),
    "ple convolution": lambda m: zero(m.conv1d.weight),
}
QSA = {
    "selection": lambda m: densely(m.indexer),
    "causal tail": lambda m: without_tail(m.indexer),
    "index keys' norm": lambda m: as_it_is(m.indexer.k_layernorm),
    "query norm": lambda m: as_it_is(m.q_norm),
    "key norm": lambda m: as_it_is(m.k_norm),
    "output gate": lambda m: zero(m.q_proj.weight.view(-1, 2, 32, 64)[:, 1]),
}
GDN = {
    "gdn convolution": lambda m: zero(m.conv1d.weight[:, :, :-1]),
    "gdn decay": lambda m: m.A_log.fill_(-100.0),
    "gdn update rate": lambda m: zero(m.in_proj_b.weight),
    "gdn gate": lambda m: setattr(m.norm, "activation", "sigmoid"),
    "gdn norm": lambda m: m.norm.weight.fill_(1.0),
}
MOE = {
    "router": lambda m: zero(m.gate.weight),
    "shares that add up to one": lambda m: setattr(m.gate, "norm_topk_prob", False),
    "routed experts": lambda m: zero(m.experts.down_proj),
    "shared expert": lambda m: zero(m.shared_expert.down_proj.weight),
    "shared expert's gate": lambda m: zero(m.shared_expert_gate.weight),
}
HYPER = {
    "injection": lambda m: zero(m.block_inject_weight.weight),
    "input mix": lambda m: zero(m.input_mix_weight_up.weight),
    "streams' norm": lambda m: zero(m.hc_norm.weight),
}
MODEL = {
    "positions": lambda m: zero(m.rotary_emb.inv_freq),
    "final mix": lambda m: zero(m.hyper_connection_mixer.input_mix_weight_up.weight),
}


def parts(model, what: str) -> list:
    """(module, deed) for every module of the judge that has the mechanism."""
    layers = model.model.layers
    mixers = [m for each in layers for m in (each.attn_hyper_connection, each.mlp_hyper_connection)]
    places = (
        (PLE, [each.ple for each in layers if each.ple is not None]),
        (QSA, [each.self_attn for each in layers if hasattr(each, "self_attn")]),
        (GDN, [each.linear_attn for each in layers if hasattr(each, "linear_attn")]),
        (MOE, [each.mlp for each in layers]),
        (HYPER, mixers),
        (MODEL, [model.model]),
    )
    return [
        (module, deeds[what]) for deeds, modules in places if what in deeds for module in modules
    ]


@pytest.mark.parametrize("what", [*PLE, *QSA, *GDN, *MOE, *HYPER, *MODEL])
def test_each_mechanism_is_visible(engine, theirs, what):
    """Without it the judge and the engine differ by far more than the bound, so parity means something."""
    chance = random.Random(3)
    prompt = [chance.randrange(256) for _ in range(90)]
    prompt[60] = prompt[80] = prompt[88] = EOS
    tokens, logits = engine.alone(prompt, 4)
    assert check(theirs, prompt, tokens, logits)[0] <= LOGITS
    other = copy.deepcopy(theirs)
    with torch.no_grad():
        for module, deed in parts(other, what):
            deed(module)
    assert (judged(other, prompt, tokens) - logits).abs().max() > 100 * LOGITS


@pytest.mark.parametrize("length", [96, 97, 98, 99])
def test_the_open_group_of_a_row_is_read_and_no_more(engine, theirs, length):
    """Rows behind 0 to 3 tokens of an incomplete group: parity with the tail, and without it only where
    there is none."""
    chance = random.Random(5)
    prompt = [chance.randrange(256) for _ in range(length)]
    tokens, logits = engine.alone(prompt, 1)
    assert check(theirs, prompt, tokens, logits)[0] <= LOGITS
    last = copy.deepcopy(theirs)
    for module, deed in parts(last, "causal tail")[-1:]:  # rows of the last layer meet in no other
        deed(module)
    differs = float((judged(last, prompt, tokens) - logits).abs().max())
    assert (differs > 100 * LOGITS) == (length % 4 != 0)
