"""The vector operations of LLVM that the tiles use, and how a stored weight becomes 16 floats."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, cast

from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

LANES = 16
F32, BF16, NVFP4 = 0, 1, 2  # the formats of a weight

FLOAT = ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VECTOR = ir.VectorType(FLOAT, LANES)

# A 16-entry table in one register; elsewhere the codes are decoded by integer arithmetic.
HAS_PERMUTE = not (config.CPU_NAME or config.CPU_FEATURES) and bool(
    binding.get_host_cpu_features().get("avx512f", False)
)
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)


def constants(element: ir.Type, values: list[int] | list[float]) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, len(values)), values)


def splat(element: ir.Type, value: int, width: int) -> ir.Constant:
    return constants(element, [value] * width)


class Emitter:
    """The few vector operations of a tile, bound to one IR builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, result: ir.Type, arguments: list[Any]) -> Any:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(result, [a.type for a in arguments]), name
        )
        return self.builder.call(function, arguments)

    def load(self, address: Any, kind: ir.Type, align: int = 1) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def masked(self, address: Any, kind: ir.VectorType, mask: Any) -> Any:
        """Lanes outside of `mask` are zero and their memory is not touched."""
        align = kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4
        name = f"llvm.masked.load.v{kind.count}{'i16' if align == 2 else 'f32'}.p0"
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        arguments = [pointer, ir.Constant(I32, align), mask, ir.Constant(kind, None)]
        return self.call(name, kind, arguments)

    def prefetch(self, address: Any) -> None:
        """Ask for a line that the next strip reads. Any address may be asked for."""
        pointer = self.builder.inttoptr(address, I8.as_pointer())
        flags = [ir.Constant(I32, value) for value in (0, 2, 1)]  # to read, into L2, data
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.v{LANES}f32", VECTOR, [a, b, c])

    def splat(self, value: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(VECTOR, None), value, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, ir.Constant(VECTOR, None), zeros)

    def part(self, vector: Any, first: int, count: int) -> Any:
        return self.builder.shuffle_vector(
            vector, vector, constants(I32, list(range(first, first + count)))
        )

    def fold(self, sums: list[Any]) -> Any:
        """The sum of the lanes of each vector, as one vector of at least so many floats, in order.

        Each is folded halves onto halves; folding two vectors side by side in one register changes the
        number of instructions and no addition.
        """
        count = 1 << (len(sums) - 1).bit_length()
        parts = sums + [ir.Constant(VECTOR, None)] * (count - len(sums))
        width = LANES
        while width > 1:
            pairs = list(zip(parts[::2], parts[1::2], strict=True)) if len(parts) > 1 else []
            lanes = 2 * LANES if pairs else parts[0].type.count
            low = [lane for lane in range(lanes) if lane % width < width // 2]
            pairs = pairs or [(parts[0], parts[0])]
            parts = [self._fold_pair(p, q, low, width // 2) for p, q in pairs]
            width //= 2
        return parts[0]

    def _fold_pair(self, p: Any, q: Any, low: list[int], by: int) -> Any:
        high = [lane + by for lane in low]
        halves = [self.builder.shuffle_vector(p, q, constants(I32, side)) for side in (low, high)]
        return self.builder.fadd(*halves)

    def widen_bf16(self, bits: Any) -> Any:
        wide = self.builder.zext(bits, ir.VectorType(I32, LANES))
        return self.builder.bitcast(self.builder.shl(wide, splat(I32, 16, LANES)), VECTOR)

    def nibbles(self, address: Any, groups: int) -> Any:
        """`groups` * 16 codes as bytes, in order: the low nibble comes first."""
        count = groups * LANES // 2
        packed = self.load(address, ir.VectorType(I8, count))
        low = self.builder.and_(packed, splat(I8, 15, count))
        high = self.builder.lshr(packed, splat(I8, 4, count))
        order = [
            lane
            for pair in zip(range(count), range(count, 2 * count), strict=True)
            for lane in pair
        ]
        return self.builder.shuffle_vector(low, high, constants(I32, order))

    def doubled(self, codes: Any) -> Any:
        """Twice the values of 16 codes as floats."""
        if HAS_PERMUTE:
            table = constants(FLOAT, [float(v) for v in (*_DOUBLED, *(-d for d in _DOUBLED))])
            wide = self.builder.zext(codes, ir.VectorType(I32, LANES))
            return self.call("llvm.x86.avx512.permvar.sf.512", VECTOR, [table, wide])
        return self.builder.sitofp(
            self.builder.sext(self._doubled_bytes(codes), ir.VectorType(I32, LANES)), VECTOR
        )

    def _doubled_bytes(self, codes: Any) -> Any:
        # 0 1 2 3 4 6 8 12 is convex: the largest of m, 2m - 4 and 4m - 16.
        b = self.builder
        magnitude = b.and_(codes, splat(I8, 7, LANES))
        value = magnitude
        for shift, less in ((1, 4), (2, 16)):
            line = b.sub(b.shl(magnitude, splat(I8, shift, LANES)), splat(I8, less, LANES))
            value = b.select(b.icmp_signed(">", line, value), line, value)
        negative = b.icmp_unsigned(">", codes, splat(I8, 7, LANES))
        return b.select(negative, b.neg(value), value)


def raw(emit: Callable[[Any, list[Any]], None], count: int) -> Callable[..., None]:
    """A function of `count` int64 arguments for compiled code, whose instructions `emit(builder, arguments)` writes."""
    signature = types.void(*([types.int64] * count))

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit(builder, list(arguments))
        return context.get_dummy_value()

    def typed(*_types: Any) -> Any:
        return signature, generate

    # numba counts the parameters, and writing out a dozen unused ones would tell the reader nothing.
    names = ["context", *(f"argument{i}" for i in range(count))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return cast("Callable[..., None]", intrinsic(typed))
