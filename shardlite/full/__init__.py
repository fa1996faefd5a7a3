"""Full weights out of a sharded model: `gathered`, state dicts, iterations over weights, and single tensors.

In: the units of a wrapped model, and calls that every rank makes. Out: full parameters and tensors, and state dicts in
the format of the unsharded model. Read `full_params.py` first.
"""

from shardlite.full.full_params import NO_COPY, FullParameters
from shardlite.full.pieces import gather_param
from shardlite.full.weight_stream import WeightStream
