"""page4 in Triton on a GPU: grouped against ungrouped, over what the rows share. Needs a CUDA or ROCm device.

    python tests/bench/bench_page4_gpu.py [--rows 64 185 1024 4096] [--context 32768] [--budget 2048]

6 query heads on 1 of keys and values, D 256, page 16, as one rank of four has them. Grouped is timed without its plan,
which is made on the host; the plan's time stands beside it.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from stallwatch_kernels import gpu
from stallwatch_kernels.qsa import page4, synthetic
from stallwatch_kernels.qsa.plan import plan
from stallwatch_kernels.qsa.synthetic import Mix

HEADS, KV_HEADS, PAGE = 6, 1, 16


def finished():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call, rounds):
    """Median seconds of a call, the device idle before and after."""
    call()
    finished()
    spent = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        finished()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def compared(mix, size, dtype, rounds):
    """Load reuse, then seconds: plan, ungrouped, grouped."""
    from stallwatch_kernels.gpu.page4 import attend

    device = "cpu" if gpu.interpreted() else "cuda"
    kv, rows = synthetic.caches((KV_HEADS, size, PAGE), mix, dtype), synthetic.rows(PAGE, mix)
    q = synthetic.queries(
        HEADS, size, mix, torch.float32 if dtype == torch.float32 else torch.float16
    )
    call = page4.prepare(q, kv, rows)
    begin = time.perf_counter()
    made = plan(call.store, call.selection)
    planned = time.perf_counter() - begin
    there = replace(kv, k=kv.k.to(device), v=kv.v.to(device))
    index = replace(rows, **{n: getattr(rows, n).to(device) for n in rows.__dataclass_fields__})
    query, precise = q.to(device), q.dtype == torch.float32
    alone = timed(lambda: attend(query, there, index, precise=precise), rounds)
    grouped = timed(lambda: attend(query, there, index, made=made, precise=precise), rounds)
    return made.reuse, planned, alone, grouped


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 185, 1024, 4096])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    why = gpu.refusal()
    if why is not None:
        parser.error(why)
    print(
        f"{'dtype':14} {'rows':>5} {'shared':>6} {'reuse':>6} {'plan ms':>8} {'alone ms':>9} {'grouped ms':>10} {'ratio':>6}"
    )
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float32):
        for count in options.rows:
            for share in (1.0, 0.75, 0.0):
                mix = Mix(count, options.context, options.budget, share)
                reuse, planned, alone, grouped = compared(mix, options.size, dtype, options.rounds)
                kind = str(dtype).removeprefix("torch.")
                milliseconds = f"{planned * 1e3:8.2f} {alone * 1e3:9.3f} {grouped * 1e3:10.3f}"
                print(
                    f"{kind:14} {count:5} {share:6.2f} {reuse:6.2f} {milliseconds} {alone / grouped:6.2f}"
                )


if __name__ == "__main__":
    main()
