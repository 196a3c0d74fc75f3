"""The Triton kernels against their torch references, in a process of its own: Triton decides at import whether it
interprets. Prints one JSON object {case: {measure: number}}; the tests judge the numbers.

    PYTHONPATH=kernels:tests TRITON_INTERPRET=1 python tests/triton_cases.py page4|gather|routed|refused SEED [cuda]
"""

import json
import sys
from dataclasses import replace

import torch

from judge import steps_between
from stallwatch_kernels.moe.layout import expert_layout, slot_layout
from stallwatch_kernels.nvfp4 import codec
from stallwatch_kernels.ple.table import Format, Shard, Table, dequantise
from stallwatch_kernels.qsa import page4, reference, synthetic
from stallwatch_kernels.qsa.plan import plan
from stallwatch_kernels.qsa.synthetic import Mix

E4M3 = torch.float8_e4m3fn
SEED = int(sys.argv[2])
DEVICE = sys.argv[3] if len(sys.argv) > 3 else "cpu"


def measured(got, exact):
    """Distance from float64: relative L2, and in steps of the result's own type."""
    got = got.cpu()
    wide, norm = got.double(), exact.norm().item() or 1.0
    found = {"finite": bool(torch.isfinite(got).all()), "rel": (wide - exact).norm().item() / norm}
    if got.dtype != torch.float32 and got.numel():
        steps = steps_between(got, exact.to(got.dtype))
        far = (wide - exact).abs() > 1e-6 * exact.pow(2).mean().sqrt() + exact.abs() * 2**-9
        found |= {"share": (steps > 0).float().mean().item()}
        found |= {"steps": int(steps[far].max()) if far.any() else 0}
    return found


def there(thing, names):
    return replace(thing, **{name: getattr(thing, name).to(DEVICE) for name in names})


def on_device(kv, rows):
    return there(kv, ("k", "v")), there(rows, rows.__dataclass_fields__)


def page4_call(shape, q_dtype, cache_dtype):
    """Two requests, and one row of every troublesome kind; memory that nobody may read is NaN."""
    heads, kv_heads, size = shape
    mix = Mix(rows=10, context=96, budget=48, requests=2, seed=SEED % 10**6)
    kv = synthetic.caches((kv_heads, size, 16), mix, torch.float32)
    rows = synthetic.rows(16, mix)
    used = torch.zeros(kv.k.shape[:2], dtype=torch.bool)
    seq_len = rows.seq_len.clone()
    seq_len[1] = 61  # what lies beyond is stale
    table = rows.page_table.clone()
    for request in range(2):
        for token in range(int(seq_len[request])):
            used[table[request, token // 16], token % 16] = True
    table[0, 2], table[1, 1] = -1, 10_000  # no such pages
    scale = 0.25 if cache_dtype == E4M3 else 1.0
    k, v = (
        torch.where(used[..., None, None], c, float("nan")).to(cache_dtype) for c in (kv.k, kv.v)
    )
    counts, row_req, indices = rows.counts.clone(), rows.row_req.clone(), rows.indices.clone()
    counts[3], row_req[5], row_req[6] = 0, -1, 7
    indices[4, ::3] = -1
    rows = replace(
        rows, page_table=table, seq_len=seq_len, counts=counts, row_req=row_req, indices=indices
    )
    kv = replace(kv, k=k, v=v, k_scale=scale, v_scale=scale)
    return synthetic.queries(heads, size, mix, q_dtype), kv, rows


def page4_cases():
    from stallwatch_kernels.gpu.page4 import attend

    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    many = [(f32, f32), (f16, f16), (bf16, bf16), (f16, E4M3), (f32, E4M3)]
    shapes = [((6, 1, 32), pair) for pair in many] + [((4, 2, 48), (f32, f32))]
    for shape, (q_dtype, cache) in shapes:
        q, kv, rows = page4_call(shape, q_dtype, cache)
        exact = reference.attend(q, kv, rows)
        made = planned(q, kv, rows)
        device = q.to(DEVICE), *on_device(kv, rows)
        case = f"{shape} {q_dtype} {cache}"
        grouped = attend(*device, made=made)
        yield f"{case} ungrouped", measured(attend(*device), exact)
        yield f"{case} grouped", measured(grouped, exact)
        empty = int(grouped[[3, 5, 6]].count_nonzero())
        yield f"{case} empty rows", {"nonzero": empty, "reuse": made.reuse}
    yield from moved_cases(attend)
    q, kv, rows = page4_call((6, 1, 32), f16, f16)
    exact = reference.attend(q, kv, rows)
    loose = attend(q.to(DEVICE), *on_device(kv, rows), precise=False)
    yield "16-bit products", {"rel": measured(loose, exact)["rel"]}


def planned(q, kv, rows):
    call = page4.prepare(q, kv, rows)
    return plan(call.store, call.selection)


def moved_cases(attend):
    """The same contents in other pages."""
    mix = Mix(rows=8, context=64, budget=32, requests=2)
    kv, rows = synthetic.caches((1, 32, 16), mix), synthetic.rows(16, mix)
    q = synthetic.queries(6, 32, mix)
    there = synthetic.moved(kv, rows, 5)
    for how in ("ungrouped", "grouped"):
        first, second = (
            attend(
                q.to(DEVICE),
                *on_device(*call),
                made=planned(q, *call) if how == "grouped" else None,
            )
            for call in ((kv, rows), there)
        )
        yield (
            f"moved {how}",
            {"same": torch.equal(first, second), "moved": not torch.equal(kv.k, there[0].k)},
        )


def table_of(fmt, rows, dim):
    random = torch.Generator().manual_seed(SEED)
    groups = -(-dim // 16)
    if fmt is Format.FP32:
        return Shard(torch.randn(rows, dim, generator=random))
    if fmt is Format.BF16:
        return Shard(torch.randn(rows, dim, generator=random).bfloat16())
    if fmt is Format.FP8:
        return Shard(torch.randn(rows, dim, generator=random).to(E4M3), None, 0.37)
    if fmt is Format.INT8:
        codes = torch.randint(-128, 128, (rows, dim), generator=random, dtype=torch.int8)
        return Shard(codes, torch.rand(rows, groups, generator=random))
    codes = torch.randint(0, 256, (rows, dim // 2), generator=random, dtype=torch.uint8)
    scales = torch.rand(rows, groups, generator=random) + 0.1
    if fmt is Format.INT4:
        return Shard(codes, scales.half())
    return Shard(codes, scales.to(E4M3), 0.37)


def gather_cases():
    from stallwatch_kernels.gpu.gather import DeviceTable, gather

    rows, dim = 50, 40  # the last group of a row is short
    wanted = torch.tensor([0, 49, 7, 7, 31, 2])
    for fmt in Format:
        shard = table_of(fmt, rows, dim)
        exact = dequantise(Table(fmt, dim, [shard]), wanted)
        scales = None if shard.scales is None else shard.scales.to(DEVICE)
        table = DeviceTable(fmt, dim, shard.codes.to(DEVICE), scales, shard.factor)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = gather(table, wanted.to(DEVICE), dtype).cpu()
            yield f"{fmt} {dtype}", {"same": torch.equal(got, exact.to(dtype)), "size": got.numel()}


def routed_cases():
    from stallwatch_kernels.gpu.routed import routed_gemm

    experts, n, k = 6, 40, 96  # expert 5 stays empty; no whole number of strips
    gate_and_up = torch.rand(experts, 2) / 1000 + 1e-4
    packed = codec.quantise(torch.randn(experts, 2, n // 2, k) / 8, gate_and_up)
    exact_weights = codec.dequantise(packed, torch.float64).flatten(1, 2)
    codes, scales = packed.codes.flatten(1, 2), packed.scales.flatten(1, 2)
    device = codec.Packed(*(t.to(DEVICE) for t in (codes, scales, gate_and_up)))
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    calls = [(0, 3, f32), (1, 1, f32), (80, 1, f32), (27, 3, f32), (27, 3, f16), (27, 3, bf16)]
    for tokens, top_k, dtype in calls:
        ids = torch.randint(0, 5, (tokens, top_k), dtype=torch.int32)
        ids[: tokens // 2] = 2  # many rows of one expert, and equal experts within a token
        x = torch.randn(tokens, k).to(dtype)
        rows = x.double().repeat_interleave(top_k, 0)
        exact = torch.einsum("rk,rnk->rn", rows, exact_weights[ids.flatten().long()])
        layouts = [expert_layout, slot_layout] if dtype == f32 and tokens != 80 else [expert_layout]
        for layout in layouts:
            got = routed_gemm(x.to(DEVICE), device, layout(ids, experts), top_k=top_k, parts=2)
            case = f"{layout.__name__} {tokens} {top_k} {dtype}"
            yield case, measured(got, exact) | {"rows": len(got)}


def refused_cases():
    from stallwatch_kernels.errors import KernelRefused
    from stallwatch_kernels.gpu.gather import DeviceTable, gather
    from stallwatch_kernels.gpu.page4 import attend
    from stallwatch_kernels.gpu.routed import routed_gemm

    q, kv, rows = page4_call((6, 1, 32), torch.float32, torch.float32)
    table = DeviceTable(Format.FP32, 8, torch.zeros(4, 8))
    packed = codec.quantise(torch.randn(2, 16, 32))
    groups = slot_layout(torch.zeros(1, 1, dtype=torch.int32), 2)
    calls = {
        "q": lambda: attend(q.double(), kv, rows),
        "q head": lambda: attend(q[..., :16], kv, rows),
        "scales": lambda: attend(q, replace(kv, k_scale=float("nan")), rows),
        "counts": lambda: attend(q, kv, replace(rows, counts=rows.counts.long())),
        "bf16 products": lambda: attend(q.bfloat16(), kv, rows, precise=False),
        "rows": lambda: gather(table, torch.tensor([4]), torch.float32),
        "row type": lambda: gather(table, torch.tensor([1], dtype=torch.int32), torch.float32),
        "x": lambda: routed_gemm(torch.zeros(1, 31), packed, groups),
        "order": lambda: routed_gemm(torch.zeros(2, 32), packed, groups),
    }
    for name, call in calls.items():
        try:
            call()
        except KernelRefused as refused:
            yield name, {"refused": refused.argument}
        else:
            yield name, {"refused": None}


CASES = {
    "page4": page4_cases,
    "gather": gather_cases,
    "routed": routed_cases,
    "refused": refused_cases,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    sys.stdout.write(json.dumps(dict(CASES[sys.argv[1]]())))
