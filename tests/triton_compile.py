"""Compile the Triton kernels for devices that are not here. Prints {target: {kernel: bytes of machine code}}.

The interpreter accepts what the compilers refuse, so that this is a test of its own. `all` takes the full sizes,
types and targets: minutes.

    PYTHONPATH=kernels:tests python tests/triton_compile.py [all]
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stallwatch_kernels.gpu import gather, page4, routed

EVERYTHING = sys.argv[1:] == ["all"]
TARGETS = {
    "cuda 90": (GPUTarget("cuda", 90, 32), "cubin"),
    "hip gfx942": (GPUTarget("hip", "gfx942", 64), "hsaco"),
}
if EVERYTHING:
    TARGETS["cuda 80"] = (GPUTarget("cuda", 80, 32), "cubin")
ATTENTION = [("fp32", "fp32", True), ("fp16", "u8", False)]
if EVERYTHING:
    ATTENTION += [("fp16", "fp16", True), ("fp16", "fp16", False), ("bf16", "bf16", False)]
HEAD = 256 if EVERYTHING else 32
POINTERS = {
    "page4": {
        "page_table": "*i32",
        "seq_len": "*i32",
        "row_req": "*i32",
        "row_pos": "*i32",
        "indices": "*i32",
        "counts": "*i32",
        "starts": "*i64",
        "lengths": "*i64",
        "keys": "*i64",
        "masks": "*i32",
        "scale": "fp32",
        "value_scale": "fp32",
    },
    "gather": {"rows": "*i64", "factor": "fp32"},
    "routed": {
        "codes": "*u8",
        "scales": "*u8",
        "factors": "*fp32",
        "order": "*i32",
        "firsts": "*i32",
        "lasts": "*i32",
        "experts": "*i32",
    },
}


def sources():
    """Every kernel in the types it is launched with: (name, function, types of its arguments, constants)."""
    sizes = {"G": 6, "D": HEAD, "DP": HEAD, "N": 32}
    for q, cache, precise in ATTENTION:
        types = {
            **POINTERS["page4"],
            "q": f"*{q}",
            "out": f"*{q}",
            "k": f"*{cache}",
            "v": f"*{cache}",
        }
        constants = {**sizes, "E4M3": cache == "u8", "PRECISE": precise}
        name = f"{q} {cache} {precise}"
        yield f"row {name}", page4.attend_row, types, {**constants, "GP": 16}
        yield f"group {name}", page4.attend_group, types, {**constants, "GP": 8, "ROWS": 8}
    stored = {
        "fp32": ("fp32", "fp32"),
        "bf16": ("bf16", "bf16"),
        "fp8": ("u8", "u8"),
        "int8": ("i8", "fp32"),
        "int4": ("u8", "fp16"),
        "nvfp4": ("u8", "u8"),
    }
    for fmt, number in gather._FORMATS.items():
        codes, scales = stored[str(fmt)]
        types = {**POINTERS["gather"], "codes": f"*{codes}", "scales": f"*{scales}", "out": "*bf16"}
        yield f"gather {fmt}", gather.gather_row, types, {"FORMAT": number, "BLOCK": 256}
    for x in ("fp32", "bf16"):
        types = {**POINTERS["routed"], "x": f"*{x}", "out": f"*{x}"}
        yield f"routed {x}", routed.routed_tile, types, {"M": 16, "N": 32, "K": 64}


def compiled(target, kind):
    for name, function, types, constants in sources():
        signature = {
            argument: "constexpr" if argument in constants else types.get(argument, "i32")
            for argument in function.arg_names
        }
        made = triton.compile(ASTSource(function, signature, constants), target=target)
        yield name, len(made.asm[kind])


if __name__ == "__main__":
    found = {name: dict(compiled(*of)) for name, of in TARGETS.items()}
    sys.stdout.write(json.dumps(found))
