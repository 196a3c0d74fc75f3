"""A matrix whose rows are apart, as compiled kernels walk it: its flat memory and the step between rows.

A projection that yields q, k, v, z, a and b in one row is read in place through such views. An array type with
free strides would cost the vector loads; a flat array and one integer do not.
"""

from __future__ import annotations

import torch

from stallwatch_kernels.errors import BadLayout, BadShape
from stallwatch_kernels.tensors import Array, array

FLOATS = (torch.float32, torch.bfloat16)


def rows_of(
    kernel: str, name: str, tensor: torch.Tensor, width: int, *dtypes: torch.dtype
) -> tuple[Array, int]:
    """The memory from the first to the last element of `[rows, width]`, and the elements from row to row.

    Raises BadShape, BadLayout or BadDtype.
    """
    if tensor.ndim != 2 or tensor.shape[1] != width:
        raise BadShape(kernel, name, f"has shape {tuple(tensor.shape)}; expected [rows, {width}]")
    step = tensor.stride(0) if tensor.shape[0] > 1 else max(width, tensor.stride(0))
    if (width > 1 and tensor.stride(1) != 1) or step < width:
        raise BadLayout(
            kernel,
            name,
            f"has strides {tuple(tensor.stride())}; expected whole rows that do not overlap",
        )
    length = (tensor.shape[0] - 1) * step + width if tensor.numel() else 0
    flat = tensor.as_strided((length,), (1,))
    return array(kernel, name, flat, *dtypes), step
