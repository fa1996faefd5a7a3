"""Pieces of parameters travel to the owners and back, unit by unit.

While the parameters of a unit are stepped, the pieces of the next unit travel, and those of the unit before return:

    queue      to 0 | to 1      | back 0 | to 2      | back 1 | back 2
    program           step 0    |          step 1    |          step 2

Whole parameters lie in two buffers, which the units use in turn. The queue runs operations in order, so a buffer is
filled again only after its former content has been sent back. The buffers are freed after the step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from shardlite.comm import Context, StreamQueue, Work, exchange
from shardlite.optimizers.members import Copies, Member, Parcel
from shardlite.optimizers.steps import UnitStep
from shardlite.params import as_they_are, round_up

_ALIGN = 128
"""Alignment of tensors in a buffer, in bytes."""


class _Flight:
    """The step of one unit, from the first message to the last."""

    def __init__(self, step: UnitStep, members: Sequence[Member], buffer: Tensor, queue: StreamQueue) -> None:
        self._step, self._members, self._queue = step, members, queue
        self._context = members[0].context
        self._unit = members[0].unit
        with torch.no_grad(), as_they_are():
            self._pieces = {each: step.begin(each) for each in members}
            own = _assembled(buffer, step, members)
            self._wholes = {each: tensors if each.moves else self._pieces[each] for each, tensors in own}
            gathered = [each for each in members if each.moves]
            parcels = [each.to_owner(self._pieces[each], self._wholes.get(each, ())) for each in gathered]
            self._work = self._submit("to owners", parcels)

    def step(self) -> None:
        """Wait for the pieces, step, and start to send the results back."""
        self._wait("to owners")
        self._step.run([(each, self._wholes[each]) for each in self._members if each.is_mine])
        returned = [each for each in self._members if each.moves or each.is_replicated]
        with torch.no_grad(), as_they_are():
            parcels = [
                each.from_owner(self._pieces[each][0], self._wholes[each][0] if each.is_mine else None)
                for each in returned
            ]
            self._work = self._submit("from owners", parcels)

    def end(self) -> None:
        """Wait for the results, and store them."""
        self._wait("from owners")
        with torch.no_grad(), as_they_are():
            for each in self._members:
                self._step.end(each, self._pieces[each][0])

    def abandon(self) -> None:
        """Wait for the latest messages on a GPU. On a CPU, a peer might never send them."""
        if self._queue.on_stream:
            self._work.wait()

    def _submit(self, purpose: str, parcels: Sequence[tuple[Parcel, Copies]]) -> Work:
        context, unit = self._context, self._unit
        during = f"a step of {len(self._members)} parameters of this unit, which must have gradients on all ranks"
        operation = context.operation(f"whole parameters of unit {unit!r} {purpose}", purpose, unit, during=during)
        numel = sum(each.numel for each in self._members)

        def run() -> None:
            with context.traffic.running(purpose, unit):
                for _, copies in parcels:
                    for target, source in copies:
                        if target.data_ptr() != source.data_ptr():
                            target.copy_(source)
                exchange([parcel for parcel, _ in parcels], context.inline[0], numel, operation=operation)

        return self._queue.submit(run)

    def _wait(self, purpose: str) -> None:
        with self._context.traffic.waiting(purpose, self._unit):
            self._work.wait()


def run(
    context: Context, steps: Sequence[UnitStep], queue: StreamQueue, meanwhile: Sequence[Callable[[], None]]
) -> None:
    """Step the parameters with a gradient of all units. Call the functions `meanwhile` while the first pieces travel.

    All ranks must pass the same units, and the same parameters must have a gradient.
    """
    active = [(each, [member for member in each.members if member.shard.grad is not None]) for each in steps]
    moving = [(step, members) for step, members in active if members]
    buffers = _buffers(context, moving)
    with context.reporting_failures("a step of whole parameters", permanently=True):
        flights = (_Flight(*each, buffers[i % len(buffers)], queue) for i, each in enumerate(moving))
        earlier, current = None, next(flights, None)
        for call in meanwhile:
            call()
        for step, members in active:
            if not members:
                step.run(())  # counts the step
        while current is not None:
            following = next(flights, None)
            with _waiting_after_errors(current, following):
                current.step()
            if earlier is not None:
                earlier.end()
            earlier, current = current, following
        if earlier is not None:
            earlier.end()


@contextmanager
def _waiting_after_errors(*flights: _Flight | None) -> Iterator[None]:
    """After an error, wait for messages in flight, which a GPU may still read or write, before memory is freed."""
    try:
        yield
    except Exception:
        for each in filter(None, flights):
            with suppress(Exception):
                each.abandon()
        raise


def _buffers(context: Context, steps: Sequence[tuple[UnitStep, Sequence[Member]]]) -> list[Tensor]:
    """Allocate the memory of whole parameters, one buffer if there is only one unit."""
    nbytes = max((_nbytes(*each) for each in steps), default=0)
    buffers = [context.empty(nbytes, torch.uint8) for _ in range(min(2, max(len(steps), 1)))]
    for each in buffers:
        context.ledger.track("whole parameters", each)
    return buffers


def _nbytes(step: UnitStep, members: Sequence[Member]) -> int:
    """Return the bytes of the whole tensors that this rank assembles for a unit."""
    moved = [each for each in members if each.is_mine and each.moves]
    return sum(round_up(nbytes, _ALIGN) for each in moved for _, nbytes in step.nbytes(each))


def _assembled(buffer: Tensor, step: UnitStep, members: Sequence[Member]) -> Sequence[tuple[Member, Sequence[Tensor]]]:
    """Divide a buffer among the members that this rank owns. A member that does not move gets no memory."""
    begin, found = 0, []
    for each in members:
        tensors = []
        for dtype, nbytes in step.nbytes(each) if each.is_mine and each.moves else ():
            tensors.append(buffer[begin : begin + nbytes].view(dtype))
            begin += round_up(nbytes, _ALIGN)
        if each.is_mine:
            found.append((each, tensors))
    return found
