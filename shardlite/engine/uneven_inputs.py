"""Joining: ranks that have different numbers of batches finish together.

Every step takes all ranks: each has a part of the weights to gather and to step. So a rank that has run out of batches
goes on with its last one, and its gradients do not count: they are zero, and the mean is that of the others.

    rank 0   batch 0   batch 1   batch 2     means over 2, 2 and 1 ranks
    rank 1   batch 0   batch 1  (batch 1)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardlite.comm import Context, Ranks, all_gather_json, broadcast
from shardlite.errors import LayoutError
from shardlite.grads import Reducer

Batch = TypeVar("Batch")

_NOTHING = object()


class Join:
    """Loops of one wrapped model over batches, where ranks have different numbers of them."""

    def __init__(self, context: Context, groups: Ranks) -> None:
        self._context = context
        self._groups = groups
        self.joined = False
        """Whether this rank has run out of batches and only takes part in the steps of the others."""

    def over(
        self, batches: Iterable[Batch], reducers: Sequence[Reducer], mends: Sequence[Callable[[], None]]
    ) -> Iterator[Batch]:
        """Yield this rank's batches, then its last one until no rank has any more.

        What an exception in the last step has left unfinished the `mends` of the models end first.

        Raises:
            LayoutError: this rank has none at all, and cannot be lent one; on every rank.
        """
        ranks = self._context.world_size
        own, last = iter(batches), _NOTHING
        try:
            while True:
                batch = next(own, _NOTHING)
                self.joined = batch is _NOTHING
                last = last if self.joined else batch
                for mend in mends:
                    mend()
                active, without = self._count(not self.joined, last is _NOTHING)
                if active == 0:
                    return
                if without:
                    lent = self._lend(_NOTHING if self.joined else batch)
                    last = lent if last is _NOTHING else last
                for reducer in reducers:
                    reducer.set_participation(counts=not self.joined, ranks=active)
                yield last  # type: ignore[misc]
        finally:
            self.joined = False
            for reducer in reducers:
                reducer.set_participation(counts=True, ranks=ranks)

    def _count(self, active: bool, without: bool) -> tuple[int, int]:
        """Return how many ranks have a batch, and how many have never had any."""
        numbers = torch.tensor([active, without], dtype=torch.int32)
        # The name has no step number: ranks that are out of step still meet here.
        self._context.all_reduce_host(numbers, self._context.operation("who has a batch", "join"))
        have, have_not = numbers.tolist()
        return have, have_not

    def _lend(self, mine: Any) -> Any:
        """Return this rank's batch or, if it has none, what the first rank that has one lends to it.

        Raises:
            LayoutError: no rank has a batch that can be lent; on every rank.
        """
        found, trouble = None, ""
        if mine is not _NOTHING:
            try:
                tensors: list[Tensor] = []
                found = _take_apart(mine, tensors), tensors
            except LayoutError as error:
                trouble = str(error)
        for group, hosts in zip(self._groups.all, self._context.hosts, strict=False):
            assert hosts is not None, "each group has one"
            said = None if found is None else found[0], trouble
            rows = all_gather_json(group, said, "a batch that is lent", self._context.timeout)
            trouble = trouble or next((f"rank {rank}: {why}" for rank, (_, why) in enumerate(rows) if why), "")
            source = next((rank for rank, (form, _) in enumerate(rows) if form is not None), None)
            if source is None:
                continue
            form = rows[source][0]
            mine_to_lend = found[1] if found is not None and source == hosts.rank else None
            lent = [each.cpu().contiguous() for each in mine_to_lend] if mine_to_lend is not None else _room_for(form)
            for each in lent:
                operation = self._context.operation("a batch that is lent", "join")
                broadcast(each.view(-1).view(torch.uint8), hosts, source=source, operation=operation)
            found = found or (form, lent)
        if found is None:
            raise LayoutError(f"a rank has no batch at all, and those of the others cannot be lent to it: {trouble}")
        return _put_together(found[0], iter(found[1]), self._context.device) if mine is _NOTHING else mine


_PLAIN = (bool, int, float, str, type(None))


def _take_apart(batch: Any, tensors: list[Tensor]) -> Any:
    """Return the form of a batch, as JSON holds it, and append its tensors to `tensors`.

    Raises:
        LayoutError: there is something else in it.
    """
    if type(batch) is Tensor:
        tensors.append(batch.detach())
        return {"tensor": [str(batch.dtype).removeprefix("torch."), list(batch.shape), batch.device.type != "cpu"]}
    if type(batch) in (list, tuple):
        return {type(batch).__name__: [_take_apart(each, tensors) for each in batch]}
    if isinstance(batch, Mapping) and all(type(key) in _PLAIN for key in batch):
        return {"dict": [[key, _take_apart(each, tensors)] for key, each in batch.items()]}
    if type(batch) in _PLAIN:
        return {"value": batch}
    raise LayoutError(
        "a batch that is lent to another rank consists of tensors, numbers and strings in lists, tuples and dicts; "
        f"got {type(batch).__module__}.{type(batch).__qualname__}"
    )


def _room_for(form: Any) -> list[Tensor]:
    """Return tensors for those of a form, in their order, on the CPU."""
    ((kind, content),) = form.items()
    if kind == "tensor":
        return [torch.empty(content[1], dtype=getattr(torch, content[0]))]
    if kind == "value":
        return []
    inside = [each for _, each in content] if kind == "dict" else content
    return [tensor for each in inside for tensor in _room_for(each)]


def _put_together(form: Any, tensors: Iterator[Tensor], device: torch.device) -> Any:
    """Return the batch of a form and its tensors, which go to `device` if they were on one."""
    ((kind, content),) = form.items()
    match kind:
        case "tensor":
            return next(tensors).to(device if content[2] else "cpu")
        case "list":
            return [_put_together(each, tensors, device) for each in content]
        case "tuple":
            return tuple(_put_together(each, tensors, device) for each in content)
        case "dict":
            return {key: _put_together(each, tensors, device) for key, each in content}
        case _:
            return content
