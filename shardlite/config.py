"""The environment variables that ShardLite knows. They are read here and nowhere else."""

import os


def poison_evicted_buffers() -> bool:
    """Tell whether buffers are to be filled with NaN when their unit is evicted (`SHARDLITE_POISON=1`).

    Code that still looks at one then computes NaN at once, instead of something plausible. The tests run this way
    throughout.
    """
    return os.environ.get("SHARDLITE_POISON", "0") not in ("", "0")
