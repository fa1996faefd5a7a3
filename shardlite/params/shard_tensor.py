"""`ShardTensor`: a sharded tensor in a state dict, which `torch.distributed.checkpoint` saves and loads.

A shard is a range of elements of the full tensor in row-major order. `torch.distributed.checkpoint` (DCP) describes
the elements of a rank by boxes, so a range is cut into at most `2 * ndim - 1` boxes:

    shape [4, 5], elements [3, 17)      . . . # #       box at (0, 3) of [1, 2]
                                        # # # # #       box at (1, 0) of [2, 5]
                                        # # # # #
                                        # # . . .       box at (3, 0) of [1, 2]

The elements of a box are contiguous in the shard, so saving and loading make no intermediate copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from shardlite.errors import LayoutError

if TYPE_CHECKING:  # importing DCP is slow, and most programs do not need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the sizes of a box, one of each per dimension."""

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""A function that gathers and returns the full tensor. Its argument is this rank's elements, 1-D."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements `[start, stop)` of a row-major tensor, in the order of the elements."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    yield from _in_row(shape, first - 1, start, min(first * row, stop))
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if first <= last:  # otherwise the range lies inside one row
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    begin = index * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - begin, stop - begin):
        yield (index, *offsets), (1, *sizes)


def apart(view: Tensor) -> Tensor:
    """Return a tensor with the same memory as `view`, but with a separate storage object.

    Parameters are parts of one buffer. Tools that write files (safetensors, Accelerate) treat tensors that share a
    storage as tied, and would write only one of them.
    """
    return torch.from_dlpack(view.detach()) if view.numel() else view.detach()


class ShardTensor(Tensor):
    """Elements `[start, stop)` of a tensor that is sharded over ranks. Its `shape` is the shape of the full tensor.

    `state_dict()` of a wrapped model and of its optimizer contains such tensors. DCP saves and loads them at any world
    size. A saved `ShardTensor` can be loaded as a plain tensor or a DTensor, and a saved plain tensor or DTensor
    as a `ShardTensor`. `to_local()` returns this rank's elements and `full_tensor()` gathers the elements of all ranks,
    as in `torch.distributed.tensor.DTensor`. Computations on a `ShardTensor` raise, because they would see only a
    shard.

    Pickling writes this rank's elements as a plain tensor. A part of a weight is not pickled, because no model could
    load it.

    Args:
        local: this rank's elements, in the shape that `to_local()` returns. If the elements are stored in another form
            (8-bit moments, split weights), `local` is a function that decodes them from `sources`.
        shape: shape of the full tensor.
        start: index of the first element of this rank, in row-major order.
        sources: tensors that `local` decodes, if `local` is a function.
        numel, dtype, device: properties of this rank's elements, if `local` is a function.
        encode: function that stores the elements of a decoded copy after the copy was written to.
        gather: function that gathers the full tensor from this rank's elements, [stop - start]. Collective.
        is_weight: whether this is a weight of a model, and not the state of an optimizer.
    """

    start: int
    stop: int
    _local: Tensor | None
    _decode: Callable[..., Tensor] | None
    _sources: Sequence[Tensor]
    _encode: Callable[[Tensor], object] | None
    _gather: Gather | None
    _is_weight: bool

    @staticmethod
    def __new__(
        cls: type[ShardTensor],
        local: Tensor | Callable[..., Tensor],
        shape: Sequence[int],
        start: int,
        *,
        sources: Sequence[Tensor] = (),
        numel: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        encode: Callable[[Tensor], object] | None = None,
        gather: Gather | None = None,
        is_weight: bool = False,
    ) -> ShardTensor:
        """Create a tensor of `shape` whose only memory is `local`."""
        if isinstance(local, Tensor):
            numel, dtype, device = local.numel(), local.dtype, local.device
        assert numel is not None, "the length of decoded elements is given"
        self: ShardTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        self.start, self.stop = start, start + numel
        self._local = local if isinstance(local, Tensor) else None
        self._decode = None if isinstance(local, Tensor) else local
        self._sources = sources
        self._encode = encode
        self._gather = gather
        self._is_weight = is_weight
        return self

    def to_local(self) -> Tensor:
        """Return this rank's elements: a view, or a decoded copy, which this tensor keeps until `commit()`."""
        if self._local is None:
            self._local = self._value()
        return self._local

    def read(self) -> Tensor:
        """Return this rank's elements, [stop - start], without keeping a decoded copy."""
        return self._value().reshape(-1)

    def full_tensor(self) -> Tensor:
        """Return a copy of the full tensor, in its shape. Collective: every rank must call it.

        Raises:
            LayoutError: this tensor is a snapshot, made for an asynchronous save.
            CommError: a peer failed, timed out or called a different operation.
        """
        if self._gather is None:
            raise LayoutError("full_tensor(): cannot gather a snapshot: use a tensor of the model's state_dict()")
        return self._gather(self.read())

    def commit(self) -> None:
        """Encode and store the decoded copy that `to_local()` has returned, if there is one, and drop the copy."""
        if self._decode is not None and self._local is not None:
            if self._encode is not None:
                self._encode(self._local)
            self._local = None

    @property
    def kept(self) -> Sequence[Tensor]:
        """The tensors that store this rank's elements: one tensor, or the sources that are decoded."""
        return [self.to_local().detach()] if self._decode is None else self._sources

    def snapshot(self, copy: Callable[[Tensor], Tensor]) -> ShardTensor:
        """Return a copy of this tensor, made by calling `copy` with each tensor that stores its elements."""
        copies = [*map(copy, self.kept)]
        if self._decode is None:
            return ShardTensor(copies[0], self.shape, self.start)
        facts = {"numel": self.stop - self.start, "dtype": self.dtype, "device": torch.device("cpu")}
        return ShardTensor(self._decode, self.shape, self.start, sources=copies, **facts)  # type: ignore[arg-type]

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes that this rank holds, in the order of its elements."""
        return boxes(self.shape, self.start, self.stop)

    def box(self, offsets: Sequence[int], local: Tensor) -> Tensor:
        """Return a view of the box at `offsets` in this rank's elements `local`, [stop - start]."""
        begin = 0
        for its, sizes in self.boxes():
            numel = prod(sizes)
            if its == tuple(offsets):
                return local[begin : begin + numel].view(sizes)
            begin += numel
        raise LayoutError(f"this rank has no box at {tuple(offsets)} of the tensor, only {list(self.boxes())}")

    def untyped_storage(self) -> NoReturn:
        """Raise `LayoutError`, because the full tensor has no memory."""
        _refuse("untyped_storage()")

    def data_ptr(self) -> NoReturn:
        """Raise `LayoutError`, because the full tensor has no memory."""
        _refuse("data_ptr()")

    # ---- the protocol of torch.distributed.checkpoint (torch/distributed/_checkpointable.py) ------------------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "a shard is one of many"
        return self.box(index.offset, self.to_local().detach().reshape(-1))

    # ---- other operations -------------------------------------------------------------------------------------------

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run copies and conversions. Refuse all other operations."""
        if func in _COPIES:
            full: ShardTensor = args[0]
            return full._like(func(full._value(), *args[1:], **(kwargs or {})))
        _refuse(func)

    def _value(self) -> Tensor:
        if self._local is not None:
            return self._local.detach()
        assert self._decode is not None
        return self._decode(*self._sources)

    def _like(self, local: Tensor) -> ShardTensor:
        return ShardTensor(local, self.shape, self.start, gather=self._gather, is_weight=self._is_weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        memo[id(self)] = copied = self._like(self._value().clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_weight and self.stop - self.start < self.numel():
            raise LayoutError(
                f"this rank has elements {self.start} to {self.stop} of a weight of {list(self.shape)}, and a file of "
                "them cannot be loaded. On every rank, call `state = model.full_state_dict(rank=0)`, and "
                "on rank 0 torch.save(state, path); or shardlite.save(path, model) on every rank"
            )
        return self._value().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardTensor(elements {self.start} to {self.stop} of {list(self.shape)}, {self.dtype})"


_COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


def _refuse(func: Any) -> NoReturn:
    raise LayoutError(
        f"{func}: this rank has only a part of the tensor. Use to_local() for this rank's elements or, on every rank, "
        "full_tensor() for the full tensor"
    )
