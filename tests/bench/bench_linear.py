"""Skinny linear beside torch, and beside what one thread can read in the same run.

    python tests/bench/bench_linear.py [--quick] [--rounds N]

One thread. Every candidate of a row is timed once per round, in turn, and its best round counts: the
machine may be shared, and a busy moment then hits all alike. Weights rotate through more memory than the
caches hold. The read bandwidth is the fastest of three plain readers over the same bytes. Exits 1 when
float32 or bfloat16 at M = 1 reads its weight at less than 60 % of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stallwatch_kernels.jit import reduction
from stallwatch_kernels.linear.skinny import SKINNY_BF16_ROWS, Linear

BAR = 0.60
ROWS = (1, 2, 4, 8, 16, 64)
COPIES = 3


@reduction
def read_one(data):
    total = np.float32(0)
    for i in range(data.size):
        total += data[i]
    return total


@reduction
def read_four(data):
    """Four streams at once: what a reader of four weight rows sees."""
    quarter = data.size // 4
    a = b = c = d = np.float32(0)
    for i in range(quarter):
        a += data[i]
        b += data[quarter + i]
        c += data[2 * quarter + i]
        d += data[3 * quarter + i]
    return a + b + c + d


def best(candidates: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Seconds of each candidate's best round; `candidate(round)` picks the round's copy of the weight."""
    for run in candidates.values():
        run(0)
    times = dict.fromkeys(candidates, float("inf"))
    for turn in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(turn)
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def bandwidth(weights: list[torch.Tensor], rounds: int) -> dict[str, float]:
    """Bytes per second of the plain readers."""
    flat = [w.view(-1).view(torch.float32) for w in weights]
    arrays = [f.numpy() for f in flat]
    readers: dict[str, Callable[[int], object]] = {
        "one stream": lambda i: read_one(arrays[i % COPIES]),
        "four streams": lambda i: read_four(arrays[i % COPIES]),
        "torch.sum": lambda i: flat[i % COPIES].sum(),
    }
    size = arrays[0].nbytes
    return {name: size / seconds for name, seconds in best(readers, rounds).items()}


@dataclass(frozen=True)
class Line:
    """One number of rows: who ran, bytes of weight a second of ours and of torch's, the plain readers'."""

    rows: int
    kernel: str
    ours: float
    torch: float
    readers: dict[str, float]
    flops: float

    @property
    def of_read(self) -> float:
        return self.ours / max(self.readers.values())

    @property
    def met(self) -> bool:
        return self.rows > 1 or self.of_read >= BAR


def lines(dtype: torch.dtype, shape: tuple[int, int], rounds: int) -> Iterator[Line]:
    """One type's rows."""
    weights = [torch.randn(shape).to(dtype) for _ in range(COPIES)]
    layers = [Linear(weight) for weight in weights]
    size = weights[0].numel() * weights[0].element_size()
    readers = bandwidth(weights, rounds)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        out = torch.empty(rows, shape[0], dtype=dtype)
        times = best(
            {
                "ours": lambda i, x=x, out=out: layers[i % COPIES](x, out),
                "torch": lambda i, x=x: torch.nn.functional.linear(x, weights[i % COPIES]),
            },
            rounds,
        )
        skinny = dtype == torch.float32 or rows <= SKINNY_BF16_ROWS
        kernel = layers[0].few.impl if skinny else layers[0].many.impl
        flops = 2 * rows * weights[0].numel() / times["ours"]
        yield Line(rows, kernel, size / times["ours"], size / times["torch"], readers, flops)


def table(dtype: torch.dtype, shape: tuple[int, int], rounds: int) -> bool:
    """Print one type's rows; whether the bar was met."""
    name = str(dtype).removeprefix("torch.")
    print(f"\n{name} [{shape[0]}, {shape[1]}], {COPIES} copies in turn")
    print("    M  kernel    weight GB/s   of read   torch GB/s   ours/torch   GFLOP/s")
    found = []
    for line in lines(dtype, shape, rounds):
        if not found:
            print(
                "  read GB/s: " + ", ".join(f"{k} {v / 1e9:.1f}" for k, v in line.readers.items())
            )
        found.append(line)
        print(
            f"  {line.rows:3d}  {line.kernel:8s} {line.ours / 1e9:11.1f}   {line.of_read:7.0%} "
            f"{line.torch / 1e9:12.1f} {line.ours / line.torch:12.2f} {line.flops / 1e9:9.0f}"
        )
    return all(line.met for line in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small weights: does it run at all")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (4096, 1024) if options.quick else (20480, 2560)
    rounds = 3 if options.quick else options.rounds
    met = [table(dtype, shape, rounds) for dtype in (torch.float32, torch.bfloat16)]
    if options.quick:  # small weights on a busy machine judge nothing
        return 0
    if not all(met):
        print(f"\nMISSED: M = 1 under {BAR:.0%} of the read bandwidth", file=sys.stderr)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
