"""Routed experts beside what one would write in torch.

    python tests/bench/bench_moe.py [--quick] [--rounds N]

One thread, one run, one table; candidates in turn within each round, the best round counts. NVFP4 is
compared with dequantising only the experts that the tokens use: at every call ("uncached"), and kept from
call to call ("cached": float32 copies, seven times the bytes). float32 and bfloat16 are compared with the
usual loop over used experts. Routings rotate, so that weights come from memory. "of read" is the bytes of
distinct expert weights per second against a plain reader of the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from stallwatch_kernels.jit import reduction
from stallwatch_kernels.moe.experts import COMPACT_ROWS, RoutedExperts
from stallwatch_kernels.moe.route import route
from stallwatch_kernels.moe.weights import ExpertWeights
from stallwatch_kernels.nvfp4 import codec

TOKENS = (1, 2, 4, 8, 9, 64, 512)
ROUTINGS = 8
Call = Callable[[int], object]


@dataclass(frozen=True)
class Size:
    experts: int
    hidden: int
    inner: int
    top_k: int


FULL = Size(128, 2560, 160, 10)
QUICK = Size(16, 256, 64, 4)


@reduction
def read_four(data):
    quarter = data.size // 4
    a = b = c = d = data[0]
    for i in range(quarter):
        a += data[i]
        b += data[quarter + i]
        c += data[2 * quarter + i]
        d += data[3 * quarter + i]
    return a + b + c + d


def best(candidates: dict[str, Call], rounds: int) -> dict[str, float]:
    for run in candidates.values():
        run(0)
    times = dict.fromkeys(candidates, float("inf"))
    for turn in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(turn)
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def loop(x, ids, shares, expert):
    """The usual loop; `expert(e)` gives w13 and w2 of one expert."""
    out = torch.zeros_like(x)
    for e in torch.unique(ids).tolist():
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        w13, w2 = expert(e)
        gate, up = torch.nn.functional.linear(x[token], w13).chunk(2, -1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2)
        out.index_add_(0, token, y * shares[token, slot, None])
    return out


def packed(size: Size) -> tuple[codec.Packed, codec.Packed]:
    w13 = torch.randn(size.experts, 2 * size.inner, size.hidden) / size.hidden**0.5
    w2 = torch.randn(size.experts, size.hidden, size.inner) / size.inner**0.5
    largest = (w.abs().amax((-1, -2)) / 2688 for w in (w13, w2))
    return codec.quantise(w13, next(largest)), codec.quantise(w2, next(largest))


def one(q: codec.Packed, expert: int) -> torch.Tensor:
    return codec.dequantise(codec.Packed(q.codes[expert], q.scales[expert], q.global_scale[expert]))


def candidates_of(kind: str, size: Size):
    """The bound experts, their bytes, and the torch ways to an expert's matrices."""
    if kind == "nvfp4":
        q13, q2 = packed(size)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def uncached(e: int):
            return one(q13, e), one(q2, e)

        def cached(e: int):
            if e not in kept:
                kept[e] = uncached(e)
            return kept[e]

        each = sum(t.nbytes for q in (q13, q2) for t in (q.codes, q.scales)) // size.experts
        return ExpertWeights.nvfp4(q13, q2), each, {"uncached": uncached, "cached": cached}
    dtype = getattr(torch, kind)
    w13 = (torch.randn(size.experts, 2 * size.inner, size.hidden) / size.hidden**0.5).to(dtype)
    w2 = (torch.randn(size.experts, size.hidden, size.inner) / size.inner**0.5).to(dtype)
    each = (w13.nbytes + w2.nbytes) // size.experts
    return ExpertWeights.dense(w13, w2), each, {"loop": lambda e: (w13[e], w2[e])}


@dataclass(frozen=True)
class Line:
    """One number of tokens: its routed rows and side of the gate, used experts, seconds of ours and of torch's ways."""

    tokens: int
    rows: int
    side: str
    used: float
    times: dict[str, float]
    of_read: float

    def ratios(self) -> dict[str, float]:
        """Torch's times over ours."""
        ours = self.times["ours"]
        return {name: t / ours for name, t in self.times.items() if name != "ours"}


def lines(kind: str, size: Size, rounds: int, read: float) -> Iterator[Line]:
    weights, each, ways = candidates_of(kind, size)
    experts = RoutedExperts(weights, size.top_k)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    for tokens in TOKENS:
        x = torch.randn(tokens, size.hidden).to(dtype)
        routings = [route(torch.randn(tokens, size.experts), size.top_k) for _ in range(ROUTINGS)]
        routings = [(shares.to(dtype), ids) for shares, ids in routings]
        used = sum(len(torch.unique(ids)) for _, ids in routings) / ROUTINGS

        def ours(turn: int, x=x, routings=routings) -> object:
            shares, ids = routings[turn % ROUTINGS]
            return experts(x, ids, shares)

        def theirs(turn: int, expert: Callable[[int], object], x=x, routings=routings) -> object:
            shares, ids = routings[turn % ROUTINGS]
            return loop(x, ids, shares, expert)

        calls: dict[str, Call] = {"ours": ours}
        for name, way in ways.items():
            calls[name] = lambda turn, way=way, theirs=theirs: theirs(turn, way)
        times = best(calls, rounds)
        rows = tokens * size.top_k
        side = "compact" if rows <= COMPACT_ROWS else "grouped"
        yield Line(tokens, rows, side, used, times, used * each / times["ours"] / read)


def table(kind: str, size: Size, rounds: int, read: float) -> None:
    print(f"\n{kind}")
    for line in lines(kind, size, rounds, read):
        ratios = "  ".join(f"{name} / ours {ratio:6.2f}" for name, ratio in line.ratios().items())
        print(
            f"  T {line.tokens:4d}  rows {line.rows:5d} {line.side}  experts {line.used:5.1f}  "
            f"ours {line.times['ours'] * 1e3:8.3f} ms  of read {line.of_read:5.0%}  {ratios}"
        )


def read_speed(quick: bool) -> float:
    """Bytes per second of a plain reader."""
    data = torch.randn(2**20 if quick else 2**26).numpy()
    return data.nbytes / best({"read": lambda _turn: read_four(data)}, 5)["read"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small weights: does it run at all")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size, rounds = (QUICK, 2) if options.quick else (FULL, options.rounds)
    read = read_speed(options.quick)
    print(f"{size}; read {read / 1e9:.1f} GB/s")
    for kind in ("nvfp4", "float32", "bfloat16"):
        table(kind, size, rounds, read)
    return 0


if __name__ == "__main__":
    sys.exit(main())
