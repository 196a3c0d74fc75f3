"""page4 on one thread: every implementation beside each other, on declared shapes.

    python tests/bench/bench_page4.py [--quick] [--check] [--only DTYPE] [--contexts N ...] [--rows N ...]

Hq 6, Hkv 1, D 256, page 16, budget 2048. A line is one call shape. Columns: same-run sgemm GFLOP/s (measured
just before the line), load-reuse ratio, then milliseconds per row: ungrouped at chunks of 1, 2, 8, 32 blocks,
ungrouped by gathering each row and calling torch's mm, grouped (planning included), dense masked SDPA over
the whole context (in float32, unpaged beforehand). Then useful GFLOP/s over sgemm for the fastest ungrouped and for grouped, each
beside the most that the memory allows (the bytes it must read, at the speed of a plain reader in the same
run, arithmetic at sgemm's speed), what
admission chose, and its time over the best of all. Useful work counts selected tokens only.

Times are the thread's CPU time, the least of a few runs, so that preemption on a shared machine does not
count; a busy neighbour still takes cache and memory bandwidth. `gather` and `dense` run on the first 32 rows
at most. `--check` exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from stallwatch_kernels.jit import reduction
from stallwatch_kernels.qsa import page4, reference, select, synthetic
from stallwatch_kernels.qsa.calibrate import calibrate
from stallwatch_kernels.qsa.indexer import KeyCache, Where
from stallwatch_kernels.qsa.layout import PagedKV, Rows
from stallwatch_kernels.qsa.plan import GROUP, plan
from stallwatch_kernels.qsa.synthetic import Mix

HEADS, SIZE, PAGE, BUDGET = 6, 256, 16, 2048
CHUNKS = (1, 2, 8, 32)
SHARES = {"all shared": 1.0, "75 % common": 0.75, "none shared": 0.0}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
FEW = 32
CONTEXTS, ROWS = (4096, 32768, 131072), (64, 185, 1024, 4096, 8192)
QUICK_CONTEXTS, QUICK_ROWS = (4096, 32768), (64, 185)
BAR_SGEMM, BAR_ADMITTED = 0.60, 1.10


@dataclass
class Line:
    """One measured shape; times in seconds a row."""

    name: str
    sgemm: float
    reuse: float
    chunks: list[float]
    gather: float
    grouped: float
    dense: float
    admitted: str
    flops: float
    bytes_: float
    read: float

    @property
    def ungrouped(self) -> float:
        return min(*self.chunks, self.gather)

    @property
    def chosen(self) -> float:
        return self.grouped if self.admitted == "grouped" else self.chunks[-1]

    @property
    def excess(self) -> float:
        return self.chosen / min(self.ungrouped, self.grouped, self.dense)

    def share(self, seconds: float) -> float:
        return self.flops / seconds / self.sgemm

    def bound(self, reuse: float) -> float:
        """The most that a perfect overlap of reading and arithmetic reaches."""
        return self.share(max(self.flops / self.sgemm, self.bytes_ / reuse / self.read))

    def text(self) -> str:
        times = [*self.chunks, self.gather, self.grouped, self.dense]
        return " ".join(
            [
                f"{self.name:38s}",
                f"{self.sgemm / 1e9:6.0f} {self.reuse:6.2f}",
                *(f"{t * 1e3:8.3f}" for t in times),
                f"{self.share(self.ungrouped):5.0%} /{self.bound(1):5.0%}",
                f"{self.share(self.grouped):5.0%} /{self.bound(self.reuse):5.0%}",
                f"{self.admitted:>10s} {self.excess:6.2f}",
            ]
        )


HEADER = " ".join(
    [
        f"{'context rows selection cache':38s}",
        f"{'sgemm':>6s} {'reuse':>6s}",
        *(f"{c:>8s}" for c in ("ung/1", "ung/2", "ung/8", "ung/32", "gather", "grouped", "dense")),
        f"{'ung / most':>12s} {'grp / most':>12s} {'admitted':>10s} {'excess':>6s}",
    ]
)


def least(work: Callable[[], object], runs: int = 3, enough: float = 0.3) -> float:
    """Seconds of the quickest run; one run is enough when it is long."""
    best, total = math.inf, 0.0
    for _ in range(runs):
        begin = time.thread_time()
        work()
        took = time.thread_time() - begin
        best, total = min(best, took), total + took
        if total > enough:
            break
    return best


@reduction
def _read(data):
    """Four streams: what a plain reader gets."""
    quarter = data.size // 4
    a = b = c = d = data[0]
    for i in range(quarter):
        a += data[i]
        b += data[quarter + i]
        c += data[2 * quarter + i]
        d += data[3 * quarter + i]
    return a + b + c + d


def read_speed(nbytes: int) -> float:
    """Bytes a second over as much memory as the caches of a context take."""
    data = np.ones(max(1 << 20, nbytes // 4), np.float32)
    return data.nbytes / least(lambda: _read(data), 5)


def sgemm() -> float:
    """FLOP/s of torch's float32 mm, 1024 cubed."""
    a, out = torch.randn(1024, 1024), torch.empty(1024, 1024)
    return 2 * 1024**3 / least(lambda: torch.mm(a, a, out=out), 5)


def gathered(q: torch.Tensor, kv: PagedKV, rows: Rows) -> torch.Tensor:
    """The ungrouped path that torch offers: copy a row's tokens together, two mm and a softmax."""
    out = torch.empty(q.shape)
    k, v = kv.k.flatten(0, 2), kv.v.flatten(0, 2)
    table, scale = rows.page_table[0].long(), SIZE**-0.5
    bits = torch.uint8 if k.dtype == torch.float8_e4m3fn else k.dtype  # no index_select for float8
    for row in range(q.shape[0]):
        tokens = rows.indices[row, : int(rows.counts[row])].long()
        slots = table[tokens // PAGE] * PAGE + tokens % PAGE
        keys = k.view(bits).index_select(0, slots).view(k.dtype).float()
        values = v.view(bits).index_select(0, slots).view(k.dtype).float()
        weights = torch.softmax(torch.mm(q[row], keys.t()) * scale, -1)
        torch.mm(weights, values, out=out[row])
    return out


def first(rows: Rows, count: int) -> Rows:
    """The first rows alone."""
    names = ("row_req", "row_pos", "indices", "counts")
    return replace(rows, **{n: getattr(rows, n)[:count].contiguous() for n in names})


def indexed(mix: Mix) -> Rows:
    """Selections of the real indexer: 4 heads of 128 over random keys, queries drifting from row to row."""
    rows = synthetic.rows(PAGE, replace(mix, budget=4))
    generator = torch.Generator().manual_seed(17)
    blocks = mix.context // 4
    keys = torch.randn(1, blocks, 128, generator=generator)
    cache = KeyCache(keys, torch.zeros(1, 1, dtype=torch.int32))
    q = torch.randn(mix.rows, 4, 128, generator=generator)
    for row in range(1, mix.rows):
        q[row] = 0.95 * q[row - 1] + math.sqrt(1 - 0.95**2) * q[row]
    where = Where(rows.row_req, rows.row_pos, rows.seq_len)
    indices, counts = select.select(q, cache, where, budget=BUDGET)
    return replace(rows, indices=indices, counts=counts)


def measure(name: str, kv: PagedKV, rows: Rows, threshold: float) -> Line:
    """All implementations on one shape."""
    count = len(rows)
    q = torch.randn(count, HEADS, SIZE, generator=torch.Generator().manual_seed(3))
    call = page4.prepare(q, kv, rows)
    made = plan(call.store, call.selection)
    settled = page4.settle(count, made, threshold)
    few = min(count, FEW)
    part, part_q = first(rows, few), q[:few]

    def grouped() -> None:
        again = plan(call.store, call.selection)
        call.grouped(again, 0, again.groups)
        call.ungrouped(again.groups * GROUP, count)

    speed, read = sgemm(), read_speed(2 * kv.k.nbytes)
    token = 2 * SIZE * kv.k.element_size()
    chunks = [least(lambda c=c: call.ungrouped(0, count, c)) / count for c in CHUNKS]
    return Line(
        name=name,
        sgemm=speed,
        reuse=made.reuse,
        chunks=chunks,
        gather=least(lambda: gathered(part_q, kv, part), 2) / few,
        grouped=least(grouped) / count,
        dense=_dense(part_q, kv, part) / few,
        admitted=settled.impl,
        flops=4.0 * HEADS * SIZE * float(rows.counts.sum()) / count,
        bytes_=token * float(rows.counts.sum()) / count,
        read=read,
    )


def _dense(q: torch.Tensor, kv: PagedKV, rows: Rows) -> float:
    """Attention alone: unpaging and widening happen before the clock starts."""
    operands = reference.dense_operands(q, kv, rows)
    return least(lambda: reference.dense_attend(*operands), 2)


def shapes(options: argparse.Namespace) -> Iterator[tuple[int, str, list[int]]]:
    """(context, selection, row counts)."""
    contexts = options.contexts or (QUICK_CONTEXTS if options.quick else CONTEXTS)
    counts = options.rows or (QUICK_ROWS if options.quick else ROWS)
    for context in contexts:
        for selection in (*SHARES, "indexer"):
            yield context, selection, list(counts)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Measure and yield, with progress on stderr."""
    dtypes = {k: v for k, v in DTYPES.items() if options.only in (None, k)}
    thresholds = {}
    for name, dtype in dtypes.items():
        spec = page4.Spec(HEADS, 1, SIZE, PAGE, torch.float32, dtype)
        found = calibrate(spec, BUDGET)
        thresholds[name] = found.threshold
        print(f"# {name}: {found.reason}", flush=True)
    begin = time.monotonic()
    for context, selection, counts in shapes(options):
        mix = Mix(max(counts), context, BUDGET, SHARES.get(selection, 0.0))
        rows = indexed(mix) if selection == "indexer" else synthetic.rows(PAGE, mix)
        for name, dtype in dtypes.items():
            kv = synthetic.caches((1, SIZE, PAGE), mix, dtype)
            for count in counts:
                label = f"{context:>7} {count:>5} {selection:12s} {name}"
                print(f"[{time.monotonic() - begin:5.0f} s] {label}", file=sys.stderr, flush=True)
                yield measure(label, kv, first(rows, count), thresholds[name])


def main() -> int:
    """Print the table and the bars."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two contexts, two row counts")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--only", choices=sorted(DTYPES), help="one cache type")
    parser.add_argument("--contexts", type=int, nargs="+", help="instead of the declared ones")
    parser.add_argument("--rows", type=int, nargs="+", help="instead of the declared ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADER)
    done = []
    for line in lines(options):
        done.append(line)
        print(line.text(), flush=True)
    bars = {
        f"ungrouped >= {BAR_SGEMM:.0%} of sgemm": [
            line.share(line.ungrouped) >= BAR_SGEMM for line in done
        ],
        f"grouped >= {BAR_SGEMM:.0%} of sgemm": [
            line.share(line.grouped) >= BAR_SGEMM for line in done
        ],
        f"admitted <= {BAR_ADMITTED} x the best": [line.excess <= BAR_ADMITTED for line in done],
    }
    for name, met in bars.items():
        print(f"{name}: {sum(met)} of {len(met)} shapes")
    return 1 if options.check and not all(all(met) for met in bars.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
