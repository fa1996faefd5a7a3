"""Reduce gradients to the shards.

In: gradients as autograd delivers them. Out: averaged gradient shards, their norm, and a flag for NaNs and infinities.
Read `reducer.py` first, then `backward_run.py`.

    reducer.py       all reductions of a model           results.py    means become the `.grad` of shards
    backward_run.py  one backward, and that of a CPU     norm.py       the global norm, and clipping
    stream_run.py    one backward on a GPU               skip_step.py  no step with a NaN or infinity
    bucket.py        collects the gradients of a unit    flags.py      names of gradients with NaNs and infinities
    policy.py        rules of buckets and means          scale.py      divides by counted items
    reduce.py        averages the gradients of a flat    solo.py       the same for a single rank
    options.py       options of a step are equal on all ranks
"""

from shardlite.grads.backward_run import Mode
from shardlite.grads.norm import Clipper
from shardlite.grads.options import StepOptions
from shardlite.grads.reduce import Stepping
from shardlite.grads.reducer import Reducer
from shardlite.grads.skip_step import Skips
