"""How many bytes a reduction by collectives stages, and into how many slices or calls it is divided.

Legend: `W` ranks, `S` elements of the longest segment, `D` staged elements of an exchange inside the bucket.
"""

from collections.abc import Sequence
from functools import lru_cache

SHORTEST = 32
"""Number of elements of the shortest slice. The lengths of longer slices are multiples of `SHORTEST`, so that rows are
aligned to 32 bytes.
"""

SLICE_NBYTES = 192 << 20
"""Maximum bytes of the staged rows of a slice."""

MOST_CALLS = 8
"""Maximum number of calls that exchange a reduction inside the bucket."""


@lru_cache(maxsize=1024)
def slices_of(longest: int, rows: int, itemsize: int, grain: int, nbytes: int) -> Sequence[tuple[int, int]]:
    """Divide segments of up to `longest` elements into slices, so that `rows` rows of a slice fit in `nbytes`.

    Return the range of elements of each slice. There are as few slices as possible, and all slices except the last
    have equal length.
    """
    if 0 < rows * longest * itemsize <= nbytes:
        return ((0, longest),)
    unit = max(grain, SHORTEST)
    most = max(nbytes // (rows * itemsize * unit), 1) * unit
    count = -(-longest // most)
    length = -(-longest // (max(count, 1) * unit)) * unit
    return tuple((start, min(start + length, longest)) for start in range(0, longest, length or 1))


@lru_cache(maxsize=64)  # so that a reduction enters no function for it
def rows_of(world_size: int) -> int:
    """Return the number of received rows of a segment. Of two ranks, each adds its own summand from the bucket."""
    return 1 if world_size == 2 else world_size


def staged_in_bucket(longest: int, world_size: int, itemsize: int, nbytes: int = SLICE_NBYTES) -> int:
    """Return the number of elements that a call of an exchange inside the bucket sends and that are staged, `D`.

    Return 0 if all received rows of segments of `longest` elements fit in `nbytes`, so that they are staged at once.
    Otherwise the result is a tenth to a fifth of the bucket `W*S`.
    """
    rows = rows_of(world_size)
    if world_size == 1 or rows * longest * itemsize <= nbytes:
        return 0
    steps = -(-(world_size - 1) // MOST_CALLS)
    parts = max(1, min(-(-MOST_CALLS // world_size), MOST_CALLS // (world_size - 1)))
    return steps * min(-(-longest // (parts * SHORTEST)) * SHORTEST, longest)


def rows_numel(longest: int, world_size: int, itemsize: int) -> int:
    """Return the number of elements of the staging buffer of a reduction of equal segments in the order of a ring."""
    return staged_in_bucket(longest, world_size, itemsize) or rows_of(world_size) * longest
