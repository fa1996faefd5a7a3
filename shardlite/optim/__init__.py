"""AdamW on arenas (buffers of many shards or moments).

In: shards with gradients, or the summands of the last addition of a reduction. Out: stepped shards. Read `adamw.py`
first.
"""

from shardlite.optim.adamw import (
    AdamW,
    check_loaded,
    clip_next_step,
    create_states,
    living,
    load_entries,
    memory_of,
    release,
    steps_in_backward,
)
from shardlite.optim.entries import canonical, convert, decoders, unconverted
from shardlite.optim.in_backward import InBackwardSteps, accumulating
