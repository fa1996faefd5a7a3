"""Rules of buckets and means, which `backward_run.py` and `reduce.py` apply to memory, and `plan/` to numbers."""

from collections.abc import Sequence

BUCKETS = 2
"""Maximum number of buckets on a CPU, not counting the root's bucket. One is reduced while the other is filled.

The maximum is 1 if shards are stepped in the backward on CPUs: such a program aims at little memory, and reductions use
the cores that would fill the next bucket. If the maximum is reached, a backward waits for a reduction before it
allocates another bucket. The backward does not wait if a peer will start this reduction only after a gather that needs
this rank; see `comm/control/progress.py`.
"""


def waits_for_unit(is_root: bool, on_stream: bool) -> bool:
    """Return whether a gradient stays in autograd's tensor until the last gradient of its unit arrives."""
    return on_stream or is_root


def must_land_first(filled: int, is_root: bool, is_root_left: bool, saves_memory: bool) -> bool:
    """Return whether the earliest reduction must end before a bucket is filled.

    Args:
        filled: number of buckets in use, not counting the root's bucket.
        is_root: whether this is the root's bucket.
        is_root_left: whether all other units have started their reductions. If so, no computation is left that could
            overlap a reduction.
        saves_memory: whether to save memory rather than overlap computation with reductions.
    """
    return is_root_left if is_root else saves_memory or filled >= BUCKETS


def before_root(are_roots: Sequence[bool]) -> int:
    """Return the number of reductions after which only the root is left, for units in the order of reductions."""
    return max((place for place, is_root in enumerate(are_roots, 1) if not is_root), default=0)


def mean_stays(stage: int, world_size: int) -> bool:
    """Return whether a mean that needs no cast stays in its bucket. If each rank has the whole mean, it stays."""
    return stage < 2 or world_size == 1
