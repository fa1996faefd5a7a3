"""The states of a unit's weights and of its gradients, and which moves between them are legal."""

from enum import Enum

from shardlite.errors import PhaseError


class Weights(Enum):
    """Where a unit's full weights are."""

    SHARDED = "sharded"  # only this rank's shard is valid; the module's parameters are placeholders
    GATHERING = "gathering"  # all-gather in flight: the full weights must not be read
    FULL = "full"  # the module's parameters are views of the full weights, and somebody uses them
    IDLE = "idle"  # the full weights are valid, but unused; in a buffer (stage 3) they may be evicted, and parameters
    # are placeholders; where they have memory of their own (stages 1, 2) parameters stay views of them


class Gradients(Enum):
    """What a unit's gradient bucket holds."""

    EMPTY = "empty"  # nothing since the last reduction
    FILLING = "filling"  # this rank's own gradients, of one or more backwards
    REDUCING = "reducing"  # reduce-scatter in flight: bucket and gradient shard must not be touched


_LEGAL: tuple[tuple[Enum, Enum], ...] = (  # no dictionary: looking one up by an `Enum` takes a call in Python
    (Weights.SHARDED, Weights.GATHERING),
    (Weights.GATHERING, Weights.FULL),
    (Weights.FULL, Weights.IDLE),
    (Weights.IDLE, Weights.FULL),
    (Weights.IDLE, Weights.SHARDED),
    (Gradients.EMPTY, Gradients.FILLING),
    (Gradients.FILLING, Gradients.REDUCING),
    (Gradients.FILLING, Gradients.EMPTY),
    (Gradients.REDUCING, Gradients.EMPTY),
)


def check_move(unit: str, now: Enum, to: Enum) -> None:
    """Raise `PhaseError` unless a unit may go from `now` to `to`."""
    if (now, to) not in _LEGAL:
        legal = ", ".join(str(end.value) for start, end in _LEGAL if start is now)
        raise PhaseError(f"unit {unit!r}: cannot go from {now.value} to {to.value}; allowed: {legal}")
