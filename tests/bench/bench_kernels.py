"""Every kernel in one table: one thread, one run, each beside its rival or its bound.

    python tests/bench/bench_kernels.py [--quick] [--check]

The figures are those of the benches beside this one, whose docstrings say how each is measured: skinny linear
(of the read bandwidth), the small ops of a decode step (x torch), PLE gather, hashing, gate and convolution,
routed experts (x torch; of the read bandwidth), page4 (of sgemm; admitted over the best). A ratio is comparable
within its line only. `--quick` takes small tables, few shapes and less than three minutes; its weights lie in the
cache, so that its figures judge nothing. `--check` exits 1 when a bar is missed. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import bench_decode_ops
import bench_linear
import bench_moe
import bench_page4
import bench_ple
import torch
from bench_ple import Row

Part = Callable[[bool], Iterator[Row]]


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def linear(quick: bool) -> Iterator[Row]:
    """Weight bytes per second of the plain reader's, and torch's time over ours."""
    shape, rounds = ((4096, 1024), 3) if quick else ((20480, 2560), 9)
    for dtype in (torch.float32, torch.bfloat16):
        for line in bench_linear.lines(dtype, shape, rounds):
            case = f"{word(dtype)} M {line.rows} {line.kernel}"
            speed = f"{line.ours / 1e9:.1f} GB/s"
            bar = bench_linear.BAR if line.rows == 1 else None
            yield Row("linear", case, speed, line.of_read, "of the read bandwidth", bar)
            yield Row("linear", case, speed, line.ours / line.torch, "x torch")


def decode_ops(quick: bool) -> Iterator[Row]:
    """Torch's time over ours."""
    rounds, least = (3, 0.001) if quick else (15, 0.01)
    with torch.inference_mode():
        for dtype, rows, case in bench_decode_ops.cases(quick):
            ours, ratio, _, _ = bench_decode_ops.compared(case, rounds, least)
            name = f"{case.name} {word(dtype)} {rows}"
            yield Row("decode", name, f"{ours * 1e6:.1f} us", ratio, "x torch")


def ple(quick: bool) -> Iterator[Row]:
    """As the bench of the PLE kernels has it."""
    yield from bench_ple.rows(*((32, 5) if quick else (512, 21)))


def moe(quick: bool) -> Iterator[Row]:
    """Torch's ways over ours, and the bytes of distinct experts per second of a plain reader's."""
    size, rounds = (bench_moe.QUICK, 2) if quick else (bench_moe.FULL, 8)
    read = bench_moe.read_speed(quick)
    for kind in ("nvfp4", "float32", "bfloat16"):
        for line in bench_moe.lines(kind, size, rounds, read):
            case = f"{kind} {line.rows} rows {line.side}"
            spent = f"{line.times['ours'] * 1e3:.3f} ms"
            yield Row("experts", case, spent, line.of_read, "of the read bandwidth")
            for name, ratio in line.ratios().items():
                yield Row("experts", case, spent, ratio, f"x torch, {name}")


def page4(quick: bool) -> Iterator[Row]:
    """Useful GFLOP/s of sgemm's, the most that the memory allows, and admitted over the best."""
    options = argparse.Namespace(
        quick=quick, only=None, contexts=[4096] if quick else None, rows=[64] if quick else None
    )
    bar, excess = bench_page4.BAR_SGEMM, bench_page4.BAR_ADMITTED
    for line in bench_page4.lines(options):
        shape = f"{' '.join(line.name.split())} reuse {line.reuse:.2f}"
        best = min(line.ungrouped, line.grouped, line.dense)
        names = [f"ungrouped/{chunk}" for chunk in bench_page4.CHUNKS]
        times = [*line.chunks, line.gather, line.grouped, line.dense]
        for name, seconds in zip([*names, "gather", "grouped", "dense"], times, strict=True):
            yield Row("page4", f"{shape} {name}", each(seconds), seconds / best, "x the best")
        for name, seconds, reuse in (
            ("ungrouped", line.ungrouped, 1.0),
            ("grouped", line.grouped, line.reuse),
        ):
            case, share = f"{shape} {name}", line.share(seconds)
            yield Row("page4", case, each(seconds), share, "of sgemm", bar)
            yield Row(
                "page4", case, each(seconds), share / line.bound(reuse), "of the memory's most"
            )
        case = f"{shape} admitted: {line.admitted}"
        yield Row("page4", case, each(line.chosen), line.excess, "x the best", excess, at_most=True)


def each(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us a row"


PARTS: list[Part] = [linear, decode_ops, ple, moe, page4]


def text(row: Row) -> str:
    bar = "" if row.bar is None else f"bar {row.bar:g} {'met' if row.met else 'MISSED'}"
    return f"{row.op:9} {row.case:58} {row.time:>16} {row.ratio:8.2f} {row.against:30} {bar}"


def main() -> int:
    """Print the table; with --check 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small, under three minutes")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin, judged = time.monotonic(), []
    for part in PARTS:
        for row in part(options.quick):
            print(text(row), flush=True)
            print(
                f"[{time.monotonic() - begin:5.0f} s] {row.op} {row.case}",
                file=sys.stderr,
                flush=True,
            )
            judged += [row] if row.bar is not None else []
    missed = [row for row in judged if not row.met]
    print(f"\n{len(judged) - len(missed)} of {len(judged)} bars met")
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
