"""How the inputs of a graph lie in memory: dense and from the start, in an order of dims that stays the same.

Strides, offsets and the bases of views are guards of a graph. An input that is a view is copied, and the copy keeps
the order of its dims in memory: with another, kernels add up in another order, and the last bits are not eager's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Copies", "Layouts", "was_written"]

Order = tuple[int, ...]


class Layouts:
    """The order of dims in memory, outermost first, for which the graphs of a region were made, by input."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._as_numbered = False

    def fit(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Say whether all tensors lie in memory as they do for the graphs there are, or may for the first one."""
        return all(_is_dense(tensor, self._order(name, tensor)) for name, tensor in tensors.items())

    def number(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Lay all inputs out as their dims are numbered from now on; say whether that changes any of these."""
        if self._as_numbered or self._orders:
            return False
        self._as_numbered = True
        return not self.fit(tensors)

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take note of the tensors that a graph was made for."""
        for name, tensor in tensors.items():
            self._orders.setdefault(name, _order_of(tensor))

    def copied(self, name: str, value: Any, copies: Copies) -> Any:
        """Return an argument, or a tuple of them, with every tensor laid out; what is so stays the same object.

        Lists and dicts are handed on as they are, since the region may write into them.
        """
        if type(value) is torch.Tensor:
            order = self._order(name, value)
            return value if _is_dense(value, order) else copies.of(value, order)
        if type(value) is tuple:
            made = tuple(self.copied(f"{name}[{index}]", member, copies) for index, member in enumerate(value))
            return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
        return value

    def _order(self, name: str, tensor: torch.Tensor) -> Order:
        order = self._orders.get(name, ())
        if self._as_numbered:
            return tuple(range(tensor.dim()))
        return order if len(order) == tensor.dim() else _order_of(tensor)


@dataclasses.dataclass
class Copies:
    """The copies made for one call, each with its original."""

    pairs: list[tuple[torch.Tensor, torch.Tensor, int]] = dataclasses.field(default_factory=list)
    """Original, copy, and the version of the copy when it was made."""

    def of(self, tensor: torch.Tensor, order: Order) -> torch.Tensor:
        """Return a copy that is no view, with the dims in this order in memory."""
        if order == tuple(range(tensor.dim())):
            copy = tensor.clone(memory_format=torch.contiguous_format)
        else:
            options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
            copy = torch.empty_permuted(tensor.shape, order, **options).copy_(tensor)
        self.pairs.append((tensor, copy, 0 if copy.is_inference() else copy._version))
        return copy

    def write_back(self, result: Any) -> Any:
        """Write to the originals what the graph wrote to their copies; return a result with them in its place."""
        written = {}
        for original, copy, version in self.pairs:
            if was_written(copy, original, version):
                original.copy_(copy)
                written[id(copy)] = original
        if not written:
            return result
        return pytree.tree_map_only(torch.Tensor, lambda tensor: written.get(id(tensor), tensor), result)


def was_written(copy: torch.Tensor, original: torch.Tensor, version: int = 0) -> bool:
    """Say whether a copy was changed in place since it was made, when it had this version."""
    if copy.is_inference():  # such tensors count no versions
        return not torch.equal(copy, original)
    return copy._version > version


def _order_of(tensor: torch.Tensor) -> Order:
    """Return the dims by their strides, outermost first, or as they are numbered where they leave gaps.

    A dim of size 1 may have any stride: the first dim stays the first then, and others lie behind their equals.
    """
    dims = tuple(range(tensor.dim()))
    if tensor.layout is not torch.strided:
        return dims

    def place(dim: int) -> tuple[bool, int, bool]:
        is_one = tensor.shape[dim] == 1
        return not (is_one and dim == 0), -tensor.stride(dim), is_one

    order = tuple(sorted(dims, key=place))
    return order if _has_no_gaps(tensor, order) else dims


def _is_dense(tensor: torch.Tensor, order: Order) -> bool:
    """Say whether a tensor begins where its storage does, and has its dims in this order without a gap."""
    if tensor.layout is not torch.strided:
        return True
    return not tensor.storage_offset() and _has_no_gaps(tensor, order)


def _has_no_gaps(tensor: torch.Tensor, order: Order) -> bool:
    """Compare every stride: torch calls a tensor contiguous whatever that of a dim of size 1 is, a guard does not."""
    expected = 1
    for dim in reversed(order):
        if tensor.stride(dim) != expected:
            return False
        expected *= tensor.shape[dim] or 1
    return True
