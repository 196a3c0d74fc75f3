"""Which routed rows form a group. A group is one small matrix product with one expert's weights.

A routed row is a (token, slot) pair, numbered token * top_k + slot. Two layouts:
- slot: every routed row is a group of its own; equal experts stay apart (merging them here would lose rows);
- expert: rows sorted by expert, contiguous groups, at most min(E, rows) of them; the offsets of unused
  groups equal the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stallwatch_kernels.errors import BadDtype, BadIndex, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.tensors import Array

_OP = "moe-layout"


@dataclass(frozen=True, slots=True)
class Groups:
    """Group g is places offsets[g] .. offsets[g + 1] - 1 and uses expert experts[g].

    order int32 [R], the routed row at each place; experts int32 [G]; offsets int32 [G + 1].
    """

    order: Array
    experts: Array
    offsets: Array


def slot_layout(ids: torch.Tensor, experts: int) -> Groups:
    """Every routed row alone. ids int32 [T, top_k], each below `experts`."""
    flat = checked_ids(ids, experts)
    count = np.arange(flat.size + 1, dtype=np.int32)
    return Groups(count[:-1], flat.copy(), count)


def expert_layout(ids: torch.Tensor, experts: int) -> Groups:
    """Rows of one expert together, experts ascending, rows of an expert in order of token, then slot."""
    flat = checked_ids(ids, experts)
    capacity = min(experts, flat.size)
    groups = Groups(
        np.empty(flat.size, np.int32),
        np.zeros(capacity, np.int32),
        np.full(capacity + 1, flat.size, np.int32),
    )
    sort_by_expert(flat, experts, groups.order, groups.experts, groups.offsets)
    return groups


def checked_ids(ids: torch.Tensor, experts: int) -> Array:
    """The ids as an array [T * top_k], or BadDtype, BadShape, BadIndex."""
    if ids.dtype != torch.int32:
        raise BadDtype(_OP, "experts", f"are {ids.dtype}; expected int32")
    if ids.ndim != 2:
        raise BadShape(_OP, "experts", f"are {tuple(ids.shape)}; expected [T, top_k]")
    if not ids.is_contiguous() or ids.device.type != "cpu":
        raise BadLayout(_OP, "experts", "are not contiguous on the CPU")
    flat: Array = ids.numpy().reshape(-1)
    where = outside(flat, experts)
    if where >= 0:
        raise no_expert(flat, where, experts)
    return flat


def no_expert(flat: Array, where: int, experts: int) -> BadIndex:
    """The error of an id that names no expert."""
    return BadIndex(_OP, "experts", f"row {where} names {flat[where]} of {experts} experts")


def check_groups(groups: Groups, rows: int, experts: int) -> None:
    """Refuse metadata that contradicts itself or the call, before anything is read through it."""
    parts = (groups.order, groups.experts, groups.offsets)
    if any(p.dtype != np.int32 or p.ndim != 1 or not p.flags.c_contiguous for p in parts):
        raise BadDtype(_OP, "groups", "must be contiguous int32 vectors")
    if groups.offsets.size != groups.experts.size + 1:
        raise BadMetadata(
            _OP, "offsets", f"are {groups.offsets.size} for {groups.experts.size} groups; one more"
        )
    if groups.order.size != rows:
        raise BadMetadata(_OP, "order", f"has {groups.order.size} places for {rows} routed rows")
    if groups.offsets[0] != 0 or groups.offsets[-1] != rows:
        ends = (int(groups.offsets[0]), int(groups.offsets[-1]))
        raise BadMetadata(_OP, "offsets", f"run from {ends[0]} to {ends[1]}; expected 0 to {rows}")
    if np.any(np.diff(groups.offsets) < 0):
        raise BadMetadata(_OP, "offsets", "decrease")
    if outside(groups.experts, experts) >= 0:
        raise BadIndex(_OP, "experts", f"name an expert outside of 0 .. {experts - 1}")
    if outside(groups.order, rows) >= 0 or np.any(np.bincount(groups.order, minlength=rows) != 1):
        raise BadMetadata(_OP, "order", "does not hold every routed row exactly once")


@kernel
def outside(values: Array, bound: int) -> int:
    """The first place whose value is not in 0 .. bound - 1; -1 if there is none."""
    for i in range(values.size):
        if values[i] < 0 or values[i] >= bound:
            return i
    return -1


@kernel
def sort_by_expert(  # noqa: PLR0917
    flat: Array, experts: int, order: Array, group_experts: Array, offsets: Array
) -> int:
    """A stable counting sort. Returns the number of groups used; fills the unused offsets with the total.

    At an id that names no expert: -1 - its place, and nothing is written.
    """
    first = np.zeros(experts + 1, np.int32)
    for i in range(flat.size):
        if flat[i] < 0 or flat[i] >= experts:
            return -1 - i
        first[flat[i] + 1] += 1
    used = 0
    for e in range(experts):
        if first[e + 1] > 0:
            group_experts[used] = e
            offsets[used] = first[e]
            used += 1
        first[e + 1] += first[e]
    for g in range(used, offsets.size):
        offsets[g] = flat.size
    for i in range(flat.size):
        order[first[flat[i]]] = i
        first[flat[i]] += 1
    return used
