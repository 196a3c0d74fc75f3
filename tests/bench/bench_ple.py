"""PLE kernels beside torch and beside the memory: one thread, one run, one table.

python tests/bench/bench_ple.py [--mib 512] [--rounds 21]

Tables are larger than any cache, ids are drawn anew for every measurement, and all contenders of a line take
turns within each round, so that a busy moment hits them alike. Time is the CPU time of this thread; a figure is
the median over the rounds; of the single call it is the wall time, median over all calls. The touch limit reads one byte of every cache line of the same number of random
rows and does nothing else. Exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.ple import conv, gate, rowids
from stallwatch_kernels.ple.conv import Conv
from stallwatch_kernels.ple.gate import Gate, GateWeights
from stallwatch_kernels.ple.gather import Gather
from stallwatch_kernels.ple.layout import NgramNumbers, ngram_layout
from stallwatch_kernels.ple.memory import bytes_at, prefetch
from stallwatch_kernels.ple.rowids import RowIds
from stallwatch_kernels.ple.table import Format, Shard, Table

DIM, HEADS = 160, 16  # the released model's
TOKENS = 256
STREAMS, HIDDEN, TAPS, DILATION = 4, 2560, 4, 3
TOUCH_BAR, TORCH_BAR, CALL_BAR_US = 0.5, 3.0, 5.0
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NUMBERS = NgramNumbers(
    vocab_size=248_320,
    embed_dim=DIM * HEADS,
    ngram_size=3,
    heads_per_ngram=8,
    vocab_base=20_000_000,
    eos=1,
)


@dataclass(frozen=True)
class Row:
    """One line: what ran, its time, what it is held against, and the bar if there is one."""

    op: str
    case: str
    time: str
    ratio: float
    against: str
    bar: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool:
        if self.bar is None:
            return True
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar


def rows(mib: int = 512, rounds: int = 21) -> Iterator[Row]:
    """All lines. `mib`: size of each table, one at a time."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for fmt in Format:
        yield from gathers(random_table(fmt, mib, generator), rounds)
    yield from hashing(generator, rounds)
    for batch in (1, 4, 64):
        for dtype in (torch.float32, torch.bfloat16):
            yield from gating(batch, dtype, generator, rounds)


def medians(rounds: int, prepare: Callable[[], object], contenders: dict[str, Callable]) -> dict:
    """Seconds of CPU per call of each, in turns, each with fresh inputs."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, contender in contenders.items():
            inputs = prepare()
            start = time.thread_time()
            contender(inputs)
            if turn >= 2:  # the first rounds compile and fault pages in
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def random_table(fmt: Format, mib: int, generator: torch.Generator) -> Table:
    """Random rows, repeated until the table has its size."""
    some = 1000
    if fmt in {Format.FP32, Format.BF16}:
        plain = torch.randn(some, DIM, generator=generator)
        codes, scales = (plain if fmt is Format.FP32 else plain.bfloat16()), None
    elif fmt is Format.FP8:
        codes = torch.randn(some, DIM, generator=generator).to(torch.float8_e4m3fn)
        scales = None
    else:
        width = DIM if fmt is Format.INT8 else DIM // 2
        codes = torch.randint(0, 256, (some, width), generator=generator).to(torch.uint8)
        codes = codes.view(torch.int8) if fmt is Format.INT8 else codes
        kinds = {Format.INT8: torch.float32, Format.INT4: torch.float16}
        scales = torch.rand(some, DIM // 16, generator=generator) + 0.1
        scales = scales.to(kinds.get(fmt, torch.float8_e4m3fn))
    parts = [part for part in (codes, scales) if part is not None]
    repeats = (mib << 20) // sum(part.nbytes for part in parts)
    whole = [part.view(torch.uint8).repeat(repeats, 1).view(part.dtype) for part in parts]
    factor = 0.3 if fmt.scaled else 1.0
    return Table(fmt, DIM, [Shard(whole[0], *whole[1:], factor=factor)])


def gathers(table: Table, rounds: int) -> Iterator[Row]:
    """Against the touch limit, against torch, and the call of one token."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from many_tokens(table, dtype, rounds)
        yield one_token(table, dtype, rounds)


def many_tokens(table: Table, dtype: torch.dtype, rounds: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(1)
    out = torch.empty(TOKENS, HEADS * DIM, dtype=dtype)
    gather = Gather(table, dtype)
    stored = codes_of(table)
    found = medians(
        rounds,
        lambda: torch.randint(0, table.rows, (TOKENS, HEADS), generator=generator),
        {
            "ours": lambda ids: gather(ids, out),
            "touch": lambda ids: touched(table, ids, 0),
            "ahead": lambda ids: touched(table, ids, 8),
            "torch": lambda ids: torch_path(table, ids.flatten()).to(dtype),
            "float": lambda ids: stored.index_select(0, ids.flatten()).float(),
        },
    )
    ours = found["ours"]
    case = f"{table.format} -> {str(dtype).removeprefix('torch.')}"
    each = f"{ours / (TOKENS * HEADS) * 1e9:.0f} ns a row"
    raw = stored.dtype == dtype
    limit = min(found["touch"], found["ahead"]) / ours
    yield Row("gather", case, each, limit, "of the touch limit", TOUCH_BAR if raw else None)
    if raw:
        return
    # torch's own .float() does all of the dequantising only where the code is a float8
    bar = TORCH_BAR if table.format is Format.FP8 else None
    yield Row("gather", case, each, found["torch"] / ours, "x torch: index, .float(), scale", bar)
    yield Row("gather", case, each, found["float"] / ours, "x torch: index, .float() alone")


def one_token(table: Table, dtype: torch.dtype, rounds: int) -> Row:
    """A bound call of 16 rows, which a decode step makes per token; other rows each time."""
    ids = torch.zeros(1, HEADS, dtype=torch.int64)
    bound = Gather(table, dtype).bind(ids, torch.empty(1, HEADS * DIM, dtype=dtype))
    wanted = torch.randint(0, table.rows, (100 * rounds, HEADS))
    times = []
    for rows_of_call in wanted:
        ids[0] = rows_of_call
        start = time.perf_counter()
        bound(1)
        times.append(time.perf_counter() - start)
    usual = statistics.median(times) * 1e6
    case = f"{table.format} -> {str(dtype).removeprefix('torch.')}, 16 rows"
    return Row("gather", case, f"{usual:.1f} us", usual, "us a call", CALL_BAR_US, at_most=True)


def touched(table: Table, ids: torch.Tensor, ahead: int) -> None:
    """Every line of the rows' codes and scales."""
    flat = ids.numpy().reshape(-1)
    for part in (*table.codes, *table.scales):
        touch(flat, part.ctypes.data, part.strides[0], ahead)


@kernel
def touch(ids, base, size, ahead):
    """One byte of every line of each row; with or without asking for later rows first."""
    seen = np.uint8(0)
    for i in range(len(ids)):
        if ahead and i + ahead < len(ids):
            for line in range(0, size, 64):
                prefetch(base + ids[i + ahead] * size + line)
        row = bytes_at(base + ids[i] * size, size)
        for line in range(0, size, 64):
            seen ^= row[line]
        seen ^= row[size - 1]
    return seen


def codes_of(table: Table) -> torch.Tensor:
    codes = torch.from_numpy(table.codes[0])
    kinds = {Format.BF16: torch.bfloat16, Format.FP8: torch.float8_e4m3fn}
    return codes.view(kinds.get(table.format, codes.dtype))


def torch_path(table: Table, ids: torch.Tensor) -> torch.Tensor:
    """What one would write in torch for the same float32 rows."""
    stored = codes_of(table).index_select(0, ids)
    if table.format in {Format.FP32, Format.BF16}:
        return stored.float()
    if table.format is Format.FP8:
        return stored.float().mul_(float(table.factors[0]))
    scales = torch.from_numpy(table.scales[0]).index_select(0, ids)
    if table.format is Format.INT8:
        values = stored.float()
    else:
        nibbles = torch.stack([stored & 15, stored >> 4], dim=-1)
        four = table.format is Format.INT4
        values = nibbles.float().sub_(8) if four else E2M1[nibbles.int()]
    if table.format is Format.NVFP4:
        scales = scales.view(torch.float8_e4m3fn)
    scaled = values.view(len(ids), -1, 16).mul_(scales.float()[:, :, None])
    return scaled.mul_(float(table.factors[0])) if table.format.scaled else scaled


def hashing(generator: torch.Generator, rounds: int) -> Iterator[Row]:
    """Row ids of a decode step and of a prompt, against the torch reference."""
    layout = ngram_layout(NUMBERS, 0)
    hasher = RowIds(layout)
    for requests, length in ((16, 1), (4, 512)):
        starts = torch.arange(0, requests * length + 1, length, dtype=torch.int32)
        context = torch.randint(0, NUMBERS.vocab_size, (requests, 2), generator=generator).int()
        total = requests * length

        def fresh(total: int = total) -> torch.Tensor:
            return torch.randint(0, NUMBERS.vocab_size, (total,), generator=generator).int()

        found = medians(
            rounds,
            fresh,
            {
                "ours": lambda ids, s=starts, c=context: hasher(ids, s, c),
                "torch": lambda ids, s=starts, c=context: rowids.reference(layout, ids, s, c),
            },
        )
        each = f"{found['ours'] / total * 1e9:.0f} ns a token"
        case = f"{requests} requests of {length}"
        yield Row("row ids", case, each, found["torch"] / found["ours"], "x torch reference")


def gating(
    batch: int, dtype: torch.dtype, generator: torch.Generator, rounds: int
) -> Iterator[Row]:
    """Gate and convolution of a decode step at the released width, against the torch references."""
    wide = STREAMS * HIDDEN
    weights = GateWeights(*(torch.randn(wide, generator=generator) * 0.1 for _ in "kqc"), STREAMS)
    weight = torch.randn(wide, TAPS, generator=generator)
    ours, mixer = Gate(weights), Conv(weight, DILATION)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    slots = torch.arange(batch, dtype=torch.int32)
    carried = Carried(mixer.new_state(batch, dtype), slots, starts)
    u, c = (torch.empty(batch, wide, dtype=dtype) for _ in "uc")

    inputs = [torch.empty(batch, n, dtype=dtype) for n in (wide, HIDDEN, wide)]
    bound = ours.bind(*inputs, u=u, c=c), mixer.bind(u, c, carried, torch.empty_like(u))

    def fresh() -> list[torch.Tensor]:
        return [x.copy_(torch.randn(x.shape, generator=generator)) for x in inputs]

    found = medians(
        rounds,
        fresh,
        {
            "gate": lambda _: bound[0](batch, batch),
            "conv": lambda _: bound[1](batch, batch),
            "torch gate": lambda x: gate.reference(weights, *x),
            "torch conv": lambda _: conv.reference(weight, DILATION, u, c, carried=carried),
        },
    )
    for op in ("gate", "conv"):
        each = f"{found[op] / batch * 1e6:.1f} us a token"
        case = f"{str(dtype).removeprefix('torch.')}, {batch} x {wide}"
        yield Row(f"PLE {op}", case, each, found[f"torch {op}"] / found[op], "x torch reference")


def main() -> int:
    """Print the table; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=21)
    asked = parser.parse_args()
    missed = 0
    for row in rows(asked.mib, asked.rounds):
        bar = "" if row.bar is None else f"bar {row.bar:g} {'met' if row.met else 'MISSED'}"
        print(f"{row.op:9} {row.case:28} {row.time:>16} {row.ratio:8.2f} {row.against:32} {bar}")
        missed += not row.met
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
