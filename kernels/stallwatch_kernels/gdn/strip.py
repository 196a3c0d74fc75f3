"""One pass over some columns of a head's state, as LLVM vector code with its accumulators in registers.

A token changes every element of the state (S = S keep + k delta) and reads it twice: q S is its output, and the
next token's k S is what that token must know before it can change anything. One pass does all three:

    s = fma(k[i], delta[j], s * keep);  out[j] = fma(q[i], s, out[j]);  held[j] = fma(k_next[i], s, held[j])

for i = 0, 1, ... in order, so that the bits are the same whether the three are done in one pass or in two, and
however wide the strip is. LLVM's own vectoriser keeps `out` and `held` in memory and checks ten arrays for overlap
at every row: three to eight times slower, measured at head sizes of 64 and 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_BYTES = 4

Pass = Callable[..., None]
"""(state, row bytes, rows, keep, k, delta, q, out, k_next, held): addresses, all float32."""


def strip(vectors: int, *, update: bool, follow: bool) -> Pass:
    """The pass over `vectors` * 16 columns. `update`: change the state and write `out`; `follow`: write `held`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def run(  # noqa: PLR0913, PLR0917
        typing: Any,  # noqa: ARG001
        state: Any,  # noqa: ARG001
        step: Any,  # noqa: ARG001
        rows: Any,  # noqa: ARG001
        keep: Any,  # noqa: ARG001
        k: Any,  # noqa: ARG001
        delta: Any,  # noqa: ARG001
        q: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        k_next: Any,  # noqa: ARG001
        held: Any,  # noqa: ARG001
    ) -> Any:
        word = types.int64
        signature = types.void(word, word, word, types.float32, *[word] * 6)

        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _Strip(builder, vectors, args).emit(update=update, follow=follow)
            return context.get_dummy_value()

        return signature, emit

    return cast("Pass", run)


@intrinsic  # type: ignore[untyped-decorator]
def fma32(typing: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
    """A * b + c rounded once: what a strip does to each of its lanes, for the columns beside the strips."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), emit


class _Strip:
    """The body of one pass, bound to an IR builder."""

    def __init__(self, builder: Any, vectors: int, args: Any) -> None:
        self.builder = builder
        self.vectors = vectors
        (self.state, self.step, self.rows, self.keep) = args[:4]
        (self.k, self.delta, self.q, self.out, self.k_next, self.held) = args[4:]

    def emit(self, *, update: bool, follow: bool) -> None:
        builder = self.builder
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        outs = [self._variable(zero) for _ in range(self.vectors if update else 0)]
        helds = [self._variable(zero) for _ in range(self.vectors if follow else 0)]
        keep = self._spread(self.keep)
        deltas = [self._load(self.delta, v) for v in range(len(outs))]
        with cgutils.for_range(builder, self.rows) as loop:
            row = builder.add(self.state, builder.mul(loop.index, self.step))
            k = self._element(self.k, loop.index) if update else None
            q = self._element(self.q, loop.index) if update else None
            following = self._element(self.k_next, loop.index) if follow else None
            for v in range(self.vectors):
                s = self._load(row, v)
                if update:
                    s = self._fma(k, deltas[v], builder.fmul(s, keep))
                    self._store(s, row, v)
                    self._add(outs[v], q, s)
                if follow:
                    self._add(helds[v], following, s)
        for target, sums in ((self.out, outs), (self.held, helds)):
            for v, total in enumerate(sums):
                self._store(builder.load(total), target, v)

    def _variable(self, value: Any) -> Any:
        variable = cgutils.alloca_once(self.builder, _VECTOR)
        self.builder.store(value, variable)
        return variable

    def _add(self, total: Any, factor: Any, s: Any) -> None:
        self.builder.store(self._fma(factor, s, self.builder.load(total)), total)

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        name = f"llvm.fma.v{LANES}f32"
        fused = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(fused, [a, b, c])

    def _place(self, address: Any, vector: int, kind: Any) -> Any:
        offset = ir.Constant(_I64, vector * LANES * _BYTES)
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())

    def _load(self, address: Any, vector: int) -> Any:
        return self.builder.load(self._place(address, vector, _VECTOR), align=_BYTES)

    def _store(self, value: Any, address: Any, vector: int) -> None:
        self.builder.store(value, self._place(address, vector, _VECTOR), align=_BYTES)

    def _element(self, address: Any, index: Any) -> Any:
        at = self.builder.add(address, self.builder.mul(index, ir.Constant(_I64, _BYTES)))
        return self._spread(self.builder.load(self._place(at, 0, _F32), align=_BYTES))

    def _spread(self, value: Any) -> Any:
        empty = ir.Constant(_VECTOR, ir.Undefined)
        one = self.builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, empty, mask)
