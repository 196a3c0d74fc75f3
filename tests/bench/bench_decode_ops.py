"""The small ops of a decode step against the same in torch, one thread, one run, interleaved.

    python tests/bench/bench_decode_ops.py [--quick]

Sizes of the bench checkpoint: hidden 512, 4 streams of rank 64, 4 key and 8 value heads of 64. A ratio is the median
over rounds of (torch's time / ours) within the round, so that what else the machine does meets both.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stallwatch_kernels.gdn import reference as gdn
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.gdn.conv import CausalConv
from stallwatch_kernels.gdn.recurrence import GatedDeltaRule, Inputs
from stallwatch_kernels.gdn.reference import Heads
from stallwatch_kernels.hc import reference as hc
from stallwatch_kernels.hc.mixer import Mixer
from stallwatch_kernels.hc.reference import Weights
from stallwatch_kernels.norm import reference as norm
from stallwatch_kernels.norm.rms import GatedRmsNorm, RmsNorm

HIDDEN, STREAMS, RANK, EPS = 512, 4, 64, 1e-6
HEADS = Heads(4, 8, 64, 64)


@dataclass
class Case:
    """One op at one number of rows: ours and torch's, each a call without arguments."""

    name: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]


def norms(rows, dtype):
    x, z = torch.randn(2, rows, HIDDEN).to(dtype)
    weight, head = torch.randn(HIDDEN), torch.randn(64)
    out = torch.empty_like(x)
    plain, gated = RmsNorm(weight, EPS).bind(x, out), GatedRmsNorm(head, EPS).bind(x, z, out)
    yield Case("norm", lambda: plain(rows), lambda: norm.rms_norm(x, weight, EPS))
    yield Case("gated norm", lambda: gated(rows), lambda: norm.gated_rms_norm(x, z, head, EPS))


def mixers(rows, dtype):
    width = STREAMS * HIDDEN
    down, up, inject = (
        (torch.randn(*shape) / shape[1] ** 0.5).to(dtype)
        for shape in ((RANK, width), (width, RANK), (STREAMS, width))
    )
    weights = Weights(down, up, torch.randn(width) * 0.1, inject, STREAMS, EPS)
    h, x = torch.randn(rows, width).to(dtype), torch.empty(rows, HIDDEN, dtype=dtype)
    gains = torch.zeros(rows, STREAMS)
    read = Mixer(weights).bind_read(h, x, gains)
    plain = native(weights, dtype)
    yield Case("hc read", lambda: read(rows), lambda: plain(h))
    y, none = torch.zeros_like(x), torch.zeros(rows, STREAMS)
    write = Mixer(weights).bind_write(h, y, none)
    yield Case("hc write", lambda: write(rows), lambda: hc.write(h, y, none))


def native(weights, dtype):
    """The read in torch, products in the weights' own type, as a model written in torch does it."""
    silu, sigmoid = torch.nn.functional.silu, torch.sigmoid

    def read(h):
        n = norm.rms_norm(h, weights.norm, EPS, HIDDEN)
        low = silu(n @ weights.down.t() / STREAMS)
        mix = sigmoid(low @ weights.up.t()) * n
        return (
            mix.unflatten(-1, (STREAMS, HIDDEN)).mean(-2),
            2 * sigmoid(n @ weights.inject.t() / STREAMS),
        )

    return read


def delta(requests, dtype, tokens=1):
    """`requests` of `tokens` tokens each."""
    total = requests * tokens
    x, out = torch.randn(total, HEADS.width).to(dtype), torch.empty(total, 512, dtype=dtype)
    a, b = torch.randn(2, total, HEADS.values).to(dtype)
    slots = torch.arange(requests, dtype=torch.int32)
    starts = torch.arange(0, total + 1, tokens, dtype=torch.int32)
    past = torch.zeros(requests, 3, HEADS.width, dtype=dtype)
    state = torch.zeros(requests, HEADS.values, HEADS.key_size, HEADS.value_size)
    kernel, a_log, bias = torch.randn(HEADS.width, 4), torch.zeros(8), torch.zeros(8)
    y = torch.empty_like(x)
    conv = CausalConv(kernel).bind(x, y, Carried(past, slots, starts))
    rule = GatedDeltaRule(HEADS, a_log, bias)
    step = rule.bind(Inputs(x, a, b), out, Carried(state, slots, starts))
    rows = [slice(r * tokens, (r + 1) * tokens) for r in range(requests)]
    zero = torch.zeros(HEADS.values, HEADS.key_size, HEADS.value_size)

    def torch_conv():
        return [gdn.causal_conv(x[r], kernel, past[n]) for n, r in enumerate(rows)]

    def torch_rule():
        decay, beta = gdn.gates(a, b, a_log, bias)
        return [gdn.delta_rule(x[r], decay[r], beta[r], zero, HEADS) for r in rows]

    kind = "decode" if tokens == 1 else f"prefill {tokens}"
    yield Case(f"conv {kind}", lambda: conv(requests), torch_conv)
    yield Case(f"delta rule {kind}", lambda: step(requests), torch_rule)


def seconds(call, least):
    """Time of one call, over as many as fill `least`."""
    count, spent = 0, 0.0
    begin = time.perf_counter()
    while spent < least:
        call()
        count += 1
        spent = time.perf_counter() - begin
    return spent / count


def compared(case, rounds, least):
    """Median time of ours, and median, lowest and highest ratio of the rounds."""
    case.ours(), case.torch()
    pairs = [(seconds(case.ours, least), seconds(case.torch, least)) for _ in range(rounds)]
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    return statistics.median(p[0] for p in pairs), statistics.median(ratios), ratios[0], ratios[-1]


def cases(quick):
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 8) if quick else (1, 2, 4, 8, 16):
            for make in (norms, mixers, delta):
                for case in make(rows, dtype):
                    yield dtype, rows, case
        if not quick:
            for case in (*delta(1, dtype, tokens=256), *delta(4, dtype, tokens=64)):
                yield dtype, 256, case


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds, least = (5, 0.002) if quick else (15, 0.01)
    print(
        f"{'op':24} {'dtype':9} {'rows':>5} {'us':>9} {'torch/ours':>11} {'lowest':>8} {'highest':>8}"
    )
    with torch.inference_mode():
        for dtype, rows, case in cases(quick):
            ours, ratio, low, high = compared(case, rounds, least)
            kind = str(dtype).removeprefix("torch.")
            print(
                f"{case.name:24} {kind:9} {rows:5} {ours * 1e6:9.1f} {ratio:11.1f} {low:8.1f} {high:8.1f}"
            )


if __name__ == "__main__":
    main()
