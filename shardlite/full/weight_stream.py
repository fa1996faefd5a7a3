"""Iterations over full parameters: one piece is in use while the next is gathered on a queue.

Before each gather the ranks exchange one flag per rank, so a rank that has left its loop early can tell the others:

    round      0            1            2
    rank 0     [piece 0]    [piece 1]    left      breaks in piece 0, when the gather of piece 1 is already in flight
    rank 1     [piece 0]    [piece 1]    error     needs piece 2, and so learns that rank 0 has left

Legend: `W` ranks that share a model, `n` elements of a piece.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardlite.comm import Context, StreamQueue, Work
from shardlite.errors import PhaseError
from shardlite.full.pieces import PURPOSE, Piece
from shardlite.weights.all_gather import isolated


class _Round:
    """One round of an iteration: the ranks exchange flags, then gather a piece. Runs on a queue."""

    work: Work

    def __init__(self, context: Context, piece: Piece, *, leaves: bool) -> None:
        self.left: list[int] = []
        """The ranks that have left their loops. Known when the round has ended."""

        self._context = context
        self._piece = piece
        self._leaves = leaves
        self._flags = context.operation("a round of full_parameters()", PURPOSE)
        self._gather = piece.operation(context)
        with isolated(context.streams):
            self.full = None if leaves else piece.empty(context)

    def execute(self) -> None:
        """Run the round. If any rank has left its loop, gather nothing."""
        flags = torch.zeros(self._context.world_size, dtype=torch.int32)
        flags[self._context.rank] = int(self._leaves)
        self._context.all_reduce_host(flags, self._flags)
        self.left = [rank for rank, flag in enumerate(flags.tolist()) if flag]
        if self.full is not None and not self.left:
            self._piece.fill(self.full, self._context.transport, self._gather)

    def wait(self) -> Tensor:
        """Return the gathered values, [n].

        Raises:
            PhaseError: another rank has left its loop.
            CommError: a peer failed, timed out or called a different operation.
        """
        self.work.wait()
        if self.left:
            raise PhaseError(
                f"rank {self.left[0]} has left its loop over full_parameters() early, so the weights that follow "
                "cannot be gathered: leave the loop at the same parameter on every rank"
            )
        assert self.full is not None
        return self.full


class WeightStream:
    """The iterations over full weights of one wrapped model, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue: StreamQueue | None = None  # created on first use
        self._open = False
        self._last: _Round | None = None  # the latest round, until someone waits for it

    def check_closed(self) -> None:
        """Check that no iteration is open. Wait for the last round of an iteration that was left early.

        Raises:
            PhaseError: an iteration is open.
            CommError: a peer failed, timed out or called a different operation.
        """
        if self._open:
            raise PhaseError(
                "a loop over full_parameters() is not finished, and its gathers must not mix with other calls: call "
                "the model and its optimizer after the loop. To end a loop early, leave it on every rank, and call "
                "close() of the iterator if a variable refers to it"
            )
        if self._last is not None:
            last, self._last = self._last, None
            last.work.wait()

    def over(
        self, pieces: Sequence[Piece], names: Mapping[Tensor, Sequence[str]], max_bytes: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of full parameters under all their names, while the next piece is gathered. Collective.

        Raises:
            PhaseError: another rank has left its loop early.
            CommError: a peer failed, timed out or called a different operation.
        """
        self._open, started, ahead = True, 0, None
        try:
            for piece, following in zip(pieces, [*pieces[1:], None][: len(pieces)], strict=True):
                if ahead is None:
                    ahead, started = self._start(piece), started + 1
                full, ahead = ahead.wait(), None
                if following is not None and _fit(piece, following, max_bytes):
                    ahead, started = self._start(following), started + 1
                for param, view in piece.views(full):
                    # Copies, because other ranks may still read the piece, and the program may write to what it gets.
                    for name in names[param]:
                        yield name, view.clone()
                self._last = ahead
                del full, view  # frees the piece before the next but one is gathered
        except GeneratorExit:
            if started < len(pieces):  # do not wait, because other ranks may start this round much later
                self._start(pieces[started], leaves=True)
            raise
        finally:
            self._open = False

    def _start(self, piece: Piece, *, leaves: bool = False) -> _Round:
        """Start a round. `leaves`: this rank has left its loop."""
        if self._queue is None:
            self._queue = self._context.queue("full state", blocking=True)
        self._last = _Round(self._context, piece, leaves=leaves)
        self._last.work = self._queue.submit(self._last.execute)
        return self._last


def _fit(now: Piece, following: Piece, max_bytes: int | None) -> bool:
    """Return whether the next piece may be gathered while `now` is in use."""
    return max_bytes is None or now.nbytes + following.nbytes + now.largest <= max_bytes
