"""What one rank keeps, in the form in which it keeps it: for copies that the same rank takes up with the same bits.

    content    | tensor | tensor | ... | objects |     one version in memory
    objects    rows: name, first element, dtype, shape, and place of each tensor; param groups; extra; generators

Unlike a checkpoint (`contents.py`) it holds everything that this rank needs, and nothing is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardlite.apps.checkpoint.contents import check_keys, generators, names_of, pickled, stateless, unpickled
from shardlite.errors import CheckpointError
from shardlite.model import ShardLite
from shardlite.optim import AdamW
from shardlite.params import ShardTensor

_ALIGN = 64
"""Tensors begin at a multiple of so many bytes."""


@dataclass(frozen=True)
class Row:
    """One tensor of a content."""

    name: str
    start: int
    """Which element of the whole tensor is its first."""

    dtype: str
    shape: Sequence[int]
    device: str
    """Type of the device where it is kept."""

    offset: int
    """Bytes from the beginning of the content."""

    @classmethod
    def of(cls, name: str, start: int, tensor: Tensor, offset: int = 0) -> Row:
        """Describe a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, start, dtype, tuple(tensor.shape), tensor.device.type, offset)

    def view(self, content: Tensor) -> Tensor:
        """View the tensor in a content."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if prod(self.shape) == 0:
            return torch.empty(tuple(self.shape), dtype=dtype)
        nbytes = prod(self.shape) * dtype.itemsize
        return content[self.offset : self.offset + nbytes].view(dtype).view(tuple(self.shape))

    @property
    def facts(self) -> tuple[Any, ...]:
        """What must be the same where it is taken up."""
        return self.name, self.start, self.dtype, tuple(self.shape), self.device


@dataclass(frozen=True)
class Kept:
    """What a rank keeps now: tensors where they are, with their places in a content, and pickled objects."""

    tensors: Sequence[tuple[Row, Tensor]]
    objects: memoryview
    begin: int
    """Where the objects begin."""

    @property
    def nbytes(self) -> int:
        """Length of the content."""
        return self.begin + len(self.objects)

    def copy_into(self, content: Tensor) -> None:
        """Copy everything."""
        for row, tensor in self.tensors:
            row.view(content).copy_(tensor)
        content[self.begin :].copy_(torch.frombuffer(self.objects, dtype=torch.uint8))


def kept(model: ShardLite, optimizer: Optimizer | None, extra: Mapping[str, Any] | None, rank: int) -> Kept:
    """Return what this rank keeps. No tensor is copied.

    Raises:
        CheckpointError: `extra` or a param group holds something that loading could execute code for.
    """
    tensors: list[tuple[Row, Tensor]] = []
    end = 0
    for name, start, tensor in (*_weights(model), *_moments(model, optimizer)):
        tensors.append((Row.of(name, start, tensor, end), tensor))
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    objects = {
        "rows": [(*row.facts, row.offset) for row, _ in tensors],
        "optimizer": type(optimizer).__name__,
        "groups": _groups(model, optimizer),
        "values": _values(model, optimizer),
        "extra": stateless(extra or {}),
        "generators": generators(),
        "loops": 0 if model._parts is None else model._parts.finished,
    }
    return Kept(tensors, pickled(f"ranks.{rank}.extra", objects).getbuffer(), end)


def _weights(model: ShardLite) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, first element and memory of weights and buffers: tied ones once, split ones in two parts."""
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts = value.kept if isinstance(value, ShardTensor) else [value.detach()]
        for i, part in enumerate(parts):
            yield f"model.{name}/{i}", value.start if isinstance(value, ShardTensor) else 0, part


def _states(model: ShardLite, optimizer: Optimizer | None) -> Iterator[tuple[str, str, Any]]:
    """Yield parameter, key and value of the optimizer's state."""
    if optimizer is not None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for name, param in zip(names_of(model, optimizer), params, strict=True):
            yield from ((name, key, value) for key, value in optimizer.state.get(param, {}).items())


def _moments(model: ShardLite, optimizer: Optimizer | None) -> Iterator[tuple[str, int, Tensor]]:
    for name, key, value in _states(model, optimizer):
        if isinstance(value, Tensor):
            yield f"optimizer.{name}/{key}", 0, value.detach()


def _values(model: ShardLite, optimizer: Optimizer | None) -> list[tuple[str, str, Any]]:
    """Return what is no tensor in the optimizer's state."""
    return [row for row in _states(model, optimizer) if not isinstance(row[2], Tensor)]


def _groups(model: ShardLite, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Return the param groups with names of parameters."""
    if optimizer is None:
        return []
    names = iter(names_of(model, optimizer))
    return [{**group, "params": [next(names) for _ in group["params"]]} for group in optimizer.param_groups]


# ---- taking up ------------------------------------------------------------------------------------------------------


class Found:
    """A content that a rank takes up.

    Args:
        content: the bytes of a version.
        begin: where its objects begin.

    Raises:
        CheckpointError: it has no objects.
    """

    def __init__(self, content: Tensor, begin: int) -> None:
        self._content = content
        objects = unpickled("the copy", io.BytesIO(content[begin:].numpy().tobytes()))
        self._rows = {row[0]: Row(*row) for row in objects["rows"]}
        self._objects: dict[str, Any] = objects
        self.extra: Any = objects["extra"]
        self.generators: dict[str, Any] = objects["generators"]
        self.loops: int = objects["loops"]

    def check(self, model: ShardLite, optimizer: Optimizer | None, extra: Mapping[str, Any] | None) -> None:
        """Raise unless it is of this rank's part of this model, and of this optimizer.

        Raises:
            CheckpointError: it is not.
        """
        here = [Row.of(*each).facts for each in _weights(model)]
        there = [row.facts for row in self._rows.values() if row.name.startswith("model.")]
        if here != there:
            differing = next((b or a for a, b in zip(there, here, strict=False) if a != b), "the number of tensors")
            raise CheckpointError(f"they are of another model, stage, or format: {differing} differs")
        kind, groups = type(optimizer).__name__, _groups(model, optimizer)
        theirs = self._objects["groups"]
        if kind != self._objects["optimizer"] or [g["params"] for g in groups] != [g["params"] for g in theirs]:
            raise CheckpointError("they are of another optimizer, or its groups of parameters are others")
        check_keys(extra or {}, self.extra, "the copy")

    def load_weights(self, model: ShardLite) -> None:
        """Overwrite weights and buffers."""
        for name, _, mine in _weights(model):
            mine.copy_(self._rows[name].view(self._content))

    def load_state(self, model: ShardLite, optimizer: Optimizer) -> None:
        """Replace the optimizer's state, parameter by parameter."""
        by_name = dict(model.named_parameters())
        entries: dict[str, dict[str, Any]] = {}
        for row in self._rows.values():
            if row.name.startswith("optimizer."):
                name, _, key = row.name.removeprefix("optimizer.").rpartition("/")
                entries.setdefault(name, {})[key] = row
        for name, key, value in self._objects["values"]:
            entries.setdefault(name, {})[key] = value
        states = (
            (param := by_name[name], {key: self._value(value, param) for key, value in entry.items()})
            for name, entry in entries.items()
        )
        if isinstance(optimizer, AdamW):
            optimizer.load_entries(states)
        else:
            optimizer.state.update(states)

    def _value(self, value: Any, param: Tensor) -> Any:
        """Return a value of the state of a parameter in memory of its own."""
        if not isinstance(value, Row):
            return value
        return value.view(self._content).to("cpu" if value.device == "cpu" else param.device, copy=True)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups, with names of parameters."""
        return list(self._objects["groups"])
