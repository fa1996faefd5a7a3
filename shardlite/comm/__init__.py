"""Collectives on 1-D tensors, and the context that all units (sharded submodules) of one model share to run them.

In: a 1-D tensor, a `Transport`, and the name of the operation. Out: the gathered tensor, or the sum of the ranks'
tensors. All ranks get the same bits. `schedule.py` writes an algorithm as a list of transfers (defined in
`transfers.py`), a transport executes them or calls whole collectives, and `streams.py` overlaps operations with the
computation. Read `collectives.py` first.
"""

from shardlite.comm import schedule
from shardlite.comm.chunking import cut_up
from shardlite.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter, staging_numel
from shardlite.comm.consensus import GroupLike, Ranks, agree, problem_in, ranks_of
from shardlite.comm.context import SPARE, Context
from shardlite.comm.control.store import all_gather_json
from shardlite.comm.operation import Operation
from shardlite.comm.program_streams import ProgramStreams
from shardlite.comm.streams import FINISHED, HostWork, Moment, StreamQueue, Work
from shardlite.comm.transport.base import Rows, StoreMean, Transport
