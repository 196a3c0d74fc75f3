"""The embedded engine beside transformers `generate` and beside what reading its weights would cost.

    python scripts/bench_engine.py [--quick] [--rounds N] [--folder DIR] [--long] [--backends] [--profile]

The bench checkpoint (`stallwatch engine make-bench`), prompts of 32 tokens, 128 new ones, one thread. In each
round every candidate runs once, in turn, and the median of the rounds counts: a shared machine then hits
all alike. Per concurrency C it prints
- tokens/s of the engine and of `generate` (prompt included), and their ratio;
- the median decode step, the distinct weight bytes that such a step reads (routed experts as really chosen),
  and the step over (bytes / read bandwidth of the same round);
- the share of the ceiling: what C1's step time, scaled by those bytes, would allow.
and behind it, of engines that were just started, the first step of each decode shape over that shape's median.
Exits 1 when a bar is missed: twice `generate` at C1, C4 and C8; 85 % of the ceiling at C4, 75 % at C8; a step at
most twice its bytes' time; a first step at most twice its median.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stallwatch.heartbeat import Board
from stallwatch_engine.checkpoint.bench import make_bench
from stallwatch_engine.faults import Faults
from stallwatch_engine.output.answers import Failure
from stallwatch_engine.sampling.sampler import results
from stallwatch_engine.schedule.request import RequestSpec
from stallwatch_engine.schedule.scheduler import Scheduler
from stallwatch_engine.worker.build import Built, build
from stallwatch_engine.worker.options import WorkerOptions
from stallwatch_kernels.jit import reduction

PROMPT, NEW = 32, 128
RATIO, STEP, FIRST = 2.0, 2.0, 2.0
CEILING = {4: 0.85, 8: 0.75}
PATIENCE_S = 120.0


@reduction
def _read(data: Any) -> Any:
    """Four streams at once, as a reader of four weight rows."""
    quarter = data.size // 4
    a = b = c = d = np.float32(0)
    for i in range(quarter):
        a += data[i]
        b += data[quarter + i]
        c += data[2 * quarter + i]
        d += data[3 * quarter + i]
    return a + b + c + d


@dataclass
class Bandwidth:
    """Reads more memory than the caches hold."""

    data: Any = field(default_factory=lambda: np.ones(64 << 20, np.float32))

    def measure(self) -> float:
        """Bytes per second, the better of two readers."""
        best = 0.0
        flat = torch.from_numpy(self.data)
        for read in (lambda: _read(self.data), flat.sum):
            begin = time.perf_counter()
            read()
            best = max(best, self.data.nbytes / (time.perf_counter() - begin))
        return best


class Engine:
    """Scheduler and executor without processes around them."""

    def __init__(self, built: Built, answers: queue.SimpleQueue[Any]) -> None:
        self.built = built
        self._answers = answers
        self._scheduler = Scheduler(built.limits)
        self._number = 0

    def run(self, prompts: list[list[int]], new: int, late: list[int] | None = None) -> Run:
        """All prompts at once, to their ends; a `late` one for one token after the first step."""
        scheduler, plans, found = self._scheduler, [], Run()
        began = last = arrived = time.perf_counter()
        for prompt in prompts:
            self._number += 1
            scheduler.add(RequestSpec(self._number, tuple(prompt), new))
        while scheduler.unfinished or plans:
            plan = scheduler.schedule()
            if plan is not None:
                plans.append(plan)
                self.built.executor.launch(plan)
                continue
            plan = plans.pop(0)
            answer = self._answers.get(timeout=PATIENCE_S)
            if isinstance(answer, Failure):
                raise answer.error
            tokens = [r.token for r in results(answer.tensors, [s.params for s in plan.samples])]
            now = time.perf_counter()
            if plan.tokens == plan.rows == len(prompts):
                found.steps.append(now - last)
            if tokens and not found.first:
                found.first = now - began
            last = now
            updates = scheduler.retire(plan.step, tokens)
            found.tokens += len(updates)
            if late is not None:
                scheduler.add(RequestSpec("late", tuple(late), 1))
                arrived, late = now, None
            if any(update.request_id == "late" for update in updates):
                found.late = now - arrived
        found.seconds = time.perf_counter() - began
        return found


@dataclass
class Run:
    """One run of the engine. `first`, `late`: seconds to the first token, and to the late request's."""

    tokens: int = 0
    seconds: float = 0.0
    first: float = 0.0
    late: float = 0.0
    steps: list[float] = field(default_factory=list)


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """The engine over the checkpoint, warmed up."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    board = Board(None, "worker", 0, 0)
    given = WorkerOptions(model=str(folder), **{"max_model_len": 4096, **options})
    with build(given, board, board.lane("main"), answers.put, faults=Faults()) as built:
        yield Engine(built, answers)


def prompts(count: int, length: int = PROMPT) -> list[list[int]]:
    """Random bytes, the same at every call."""
    generator = torch.Generator().manual_seed(count)
    found: list[list[int]] = torch.randint(0, 256, (count, length), generator=generator).tolist()
    return found


def step_bytes(eng: Engine, count: int) -> tuple[float, float]:
    """Distinct weight bytes of a decode step at that concurrency, and experts chosen a layer, both means."""
    forward = eng.built.executor.forward
    experts, chosen = forward._scratch.moe.experts, []

    def instrumented(runs: list[Any]) -> list[Any]:
        def wrap(run: Any) -> Any:
            def counted(tokens: int, requests: int) -> None:
                experts.fill_(-1)
                run(tokens, requests)
                if tokens == requests == count and int(experts[0, 0]) >= 0:
                    chosen.append(len(experts[:tokens].unique()))

            return counted

        return [wrap(run) for run in runs]

    plain = forward._before, forward._after
    forward._before, forward._after = map(instrumented, plain)
    eng.run(prompts(count), 32)
    forward._before, forward._after = plain
    config = eng.built.config
    mean = statistics.mean(chosen)
    return _dense_bytes(config) + mean * len(config.layers) * _expert_bytes(config), mean


def _expert_bytes(config: Any) -> int:
    return int(3 * config.moe.width * config.hidden * 4)


def _dense_bytes(config: Any) -> int:
    """Weights that every step reads: all but tables, embeddings and routed experts."""
    hidden, wide, gdn, qsa = config.hidden, config.residual, config.gdn, config.qsa
    hyper = wide * (2 * config.hyper.rank + config.hyper.streams)
    moe = hidden * (config.moe.experts + 3 * config.moe.shared_width + 1)
    linear = hidden * (gdn.channels + gdn.values + 2 * gdn.value_heads) + gdn.values * hidden
    heads = qsa.query_heads * qsa.head_dim
    attention = hidden * (2 * heads + 2 * qsa.kv_heads * qsa.head_dim) + heads * hidden
    attention += hidden * (qsa.index_heads + 1) * qsa.index_dim
    kinds = [linear if kind.value == "linear_attention" else attention for kind in config.layers]
    total = sum(kinds) + len(kinds) * (2 * hyper + moe)
    if config.ple is not None:
        total += len(config.ple.layers) * config.ple.embed_dim * (wide + hidden)
    total += 2 * wide * config.hyper.rank + hidden * config.vocab
    return int(4 * total)


class Judge:
    """transformers `generate`, greedy, on the same files."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def seconds(self, asked: list[list[int]], new: int) -> float:
        ids = torch.tensor(asked)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
            )
        assert out.shape[1] == ids.shape[1] + new
        return time.perf_counter() - begin


@dataclass
class Row:
    """What the rounds brought at one concurrency."""

    count: int
    nbytes: float
    chosen: float
    rates: list[float] = field(default_factory=list)
    judge: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


def throughput(  # noqa: PLR0917
    eng: Engine, judge: Judge | None, counts: list[int], rounds: int, new: int
) -> bool:
    """Print the table; whether all bars were met."""
    rows = [Row(count, *step_bytes(eng, count)) for count in counts]
    reader = Bandwidth()
    reader.measure()
    reads: list[float] = []
    for _ in range(rounds):
        for row in rows:
            read = reader.measure()
            reads.append(read)
            found = eng.run(prompts(row.count), new)
            step = statistics.median(found.steps)
            row.rates.append(found.tokens / found.seconds)
            row.steps.append(step)
            row.over.append(step / (row.nbytes / read))
            if judge is not None:
                row.judge.append(row.count * new / judge.seconds(prompts(row.count), new))
    print(f"read bandwidth, one thread, same rounds: {statistics.median(reads) / 1e9:.1f} GB/s")
    print(
        "  C  engine tok/s  generate tok/s  ratio  step ms  MB/step  experts  step/bytes  ceiling"
    )
    good = True
    for row in rows:
        share = rows[0].step * row.nbytes / rows[0].nbytes / row.step
        rate, over = statistics.median(row.rates), statistics.median(row.over)
        theirs = statistics.median(row.judge) if row.judge else float("nan")
        print(
            f"{row.count:3}  {rate:12.1f}  {theirs:14.1f}  {rate / theirs:5.2f}  {row.step * 1e3:7.2f}"
            f"  {row.nbytes / 1e6:7.1f}  {row.chosen:7.2f}  {over:10.2f}  {share:7.0%}"
        )
        missed = [
            name
            for name, bad in (
                (f"{RATIO}x generate", row.count != 2 and rate / theirs < RATIO),
                (
                    f"{CEILING.get(row.count, 0):.0%} of the ceiling",
                    share < CEILING.get(row.count, 0),
                ),
                (f"step at most {STEP}x its bytes", over > STEP),
            )
            if bad
        ]
        if missed:
            print(f"     MISSED at C{row.count}: {', '.join(missed)}")
        good &= not missed
    return good


def long_prompts(eng: Engine) -> None:
    """Prompts of 1,024 and 3,072 tokens: time to the first token, and the rate of the prefill."""
    for length in (1024, 3072):
        found = [eng.run(prompts(1, length), 1).first for _ in range(3)]
        first = statistics.median(found)
        print(
            f"prompt {length}: first token after {first * 1e3:.0f} ms, {length / first:.0f} tok/s"
        )


def beside_a_long_one(folder: Path) -> None:
    """Time to the first token of a short prompt, alone and while one of 3,072 is being computed, by chunk."""
    for chunk in (512, 128, 32):
        with engine(folder, max_chunk=chunk) as eng:
            alone = statistics.median(eng.run(prompts(1), 1).first for _ in range(3))
            beside = statistics.median(_second(eng) for _ in range(3))
        print(
            f"prompt {PROMPT}, chunk {chunk}: first token after {alone * 1e3:.0f} ms alone, "
            f"{beside * 1e3:.0f} ms beside a prompt of 3072"
        )


def _second(eng: Engine) -> float:
    """Seconds to the short request's token, which arrives when the long one has run a step."""
    long, short = prompts(1, 3072)[0], prompts(1)[0]
    return eng.run([long], 1, late=short).late


def first_uses(folder: Path, rounds: int) -> bool:
    """The first step of each decode shape in a new engine over the median of that shape; whether the bar is met."""
    found: dict[int, list[float]] = {count: [] for count in (4, 3, 2, 1)}
    for _ in range(rounds):
        with engine(folder, max_num_seqs=4) as eng:
            for count, ratios in found.items():
                steps = eng.run(prompts(count), 32).steps
                ratios.append(steps[0] / statistics.median(steps))
    good = True
    for count, ratios in found.items():
        ratio = statistics.median(ratios)
        missed = "" if ratio <= FIRST else f"  MISSED: at most {FIRST}x"
        print(f"C{count}: first step {ratio:.2f}x its median{missed}")
        good &= not missed
    return good


def backends(folder: Path, new: int, rounds: int) -> None:
    """What the place of the tables costs in a decode step, beside resident ones: in turn, each round's difference."""
    steps: dict[str, list[float]] = {name: [] for name in ("resident", "process", "disk")}
    with ExitStack() as stack:
        tables = stack.enter_context(tempfile.TemporaryDirectory())
        engines = {}
        for name in steps:
            where = {"ple_backend": name, "ple_folder": tables if name == "disk" else None}
            engines[name] = stack.enter_context(engine(folder, max_num_seqs=4, **where))
            engines[name].run(prompts(4), 8)
        for _ in range(rounds):
            for name, found in steps.items():
                found.append(statistics.median(engines[name].run(prompts(4), new).steps))
    for name, found in steps.items():
        over = [mine - base for mine, base in zip(found, steps["resident"], strict=True)]
        print(
            f"{name:9} C4 step {statistics.median(found) * 1e3:.2f} ms, "
            f"{statistics.median(over) * 1e6:+.0f} us ({min(over) * 1e6:+.0f} to {max(over) * 1e6:+.0f})"
        )


def profile(eng: Engine, count: int) -> None:
    """Where a decode step's time goes on the model stream, by block."""
    forward = eng.built.executor.forward
    spent: dict[str, float] = {}

    def timed(name: str, run: Any) -> Any:
        def measured(*counts: int) -> Any:
            begin = time.perf_counter()
            try:
                return run(*counts)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

        return measured

    plain = forward._before, forward._after, forward._logits, forward._embed
    forward._before = [timed(f"{i} {r.__qualname__}", r) for i, r in enumerate(plain[0])]
    first = len(plain[0])
    forward._after = [timed(f"{i} {r.__qualname__}", r) for i, r in enumerate(plain[1], first)]
    forward._logits, forward._embed = timed("logits", plain[2]), timed("embed", plain[3])
    found = eng.run(prompts(count), NEW)
    forward._before, forward._after, forward._logits, forward._embed = plain
    print(f"C{count}: step {statistics.median(found.steps) * 1e6:.0f} us")
    for name, seconds in spent.items():
        print(f"  {seconds / NEW * 1e6:8.0f} us  {name}")
    print(f"  {sum(spent.values()) / NEW * 1e6:8.0f} us  all blocks")


def main() -> int:
    """The tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds, C1 and C4, 32 new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is or goes")
    parser.add_argument("--no-generate", action="store_true", help="without transformers")
    parser.add_argument("--long", action="store_true", help="also prompts of 1,024 and 3,072")
    parser.add_argument("--backends", action="store_true", help="also the three PLE backends")
    parser.add_argument("--profile", action="store_true", help="blocks of a step, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "bench"
        make_bench(folder)
        counts, rounds, new = [1, 2, 4, 8], options.rounds, NEW
        if options.quick:
            counts, rounds, new = [1, 4], 2, 32
        with engine(folder) as eng:
            if options.profile:
                for count in counts:
                    profile(eng, count)
                return 0
            judge = None if options.no_generate else Judge(folder)
            good = throughput(eng, judge, counts, rounds, new)
            if options.long:
                long_prompts(eng)
        good &= first_uses(folder, rounds)
        if options.long:
            beside_a_long_one(folder)
        if options.backends:
            backends(folder, new, rounds)
    return not good


if __name__ == "__main__":
    sys.exit(main())
