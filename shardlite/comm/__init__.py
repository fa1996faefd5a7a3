"""Collectives on 1-D tensors, and the context that all units (sharded submodules) of one model share to run them.

In: a 1-D tensor, a `Transport`, and the name of the operation. Out: the gathered tensor, or the sum of the ranks'
tensors. All ranks get the same bits. `schedule.py` writes an algorithm as a list of transfers (defined in
`transfers.py`), a transport executes the transfers, and `streams.py` overlaps operations with the computation. Read
`collectives.py` first.
"""

from shardlite.comm import schedule
from shardlite.comm.chunking import CHUNK_BYTES, cut_up
from shardlite.comm.collectives import (
    SUMMABLE,
    all_gather,
    all_reduce,
    are_equal,
    broadcast,
    exchange,
    reduce_scatter,
    ring_step,
    staging_numel,
)
from shardlite.comm.consensus import (
    GroupLike,
    Ranks,
    WeightVersion,
    agree,
    check_versions,
    collectives_of_program,
    identify,
    problem_in,
    ranks_of,
)
from shardlite.comm.context import SPARE, Context, share
from shardlite.comm.control.store import all_gather_json
from shardlite.comm.operation import Operation
from shardlite.comm.program_streams import ProgramStreams
from shardlite.comm.schedule import Order, order_of_addition
from shardlite.comm.streams import FINISHED, Moment, StreamQueue, Work, make_queue, submit_in_turn
from shardlite.comm.traffic import Sent
from shardlite.comm.transfers import Schedule, Transfer
from shardlite.comm.transport.base import FusedStep, Rows, StoreMean, Transport
from shardlite.comm.transport.gloo import GlooTransport, over_gloo
from shardlite.comm.transport.loans import BLOCK
from shardlite.comm.transport.select import choose, connect
from shardlite.comm.transport.shared_memory.heap import (
    Mapping,
    has_fixed_size,
    lazy_zeros,
    make_memory,
    physical_memory,
)
from shardlite.comm.transport.shared_memory.rendezvous import host_name
from shardlite.comm.transport.staging import rows_numel
