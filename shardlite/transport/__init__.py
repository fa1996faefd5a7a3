"""How bytes get from rank to rank. Parameters and gradients travel by this package only."""

from shardlite.transport.base import Around, Completed, Loan, Message, Pending, Transport
from shardlite.transport.connect import Choice, choose, connect, connect_hosts
from shardlite.transport.counted import Counted, Tally
from shardlite.transport.endings import tell_of_the_end
from shardlite.transport.group import GroupTransport
from shardlite.transport.interrupts import defer_interrupts
from shardlite.transport.local import LocalTransport, local_world
from shardlite.transport.meeting import meet
from shardlite.transport.nccl import NcclTransport
from shardlite.transport.notes import Board, Notes, SharedBoard, StoreBoard
from shardlite.transport.ranks import Groups, Ranks, groups_of
from shardlite.transport.shared_memory import SharedMemoryTransport
from shardlite.transport.staged import StagedTransport
from shardlite.transport.store import TIMEOUT, tell
from shardlite.transport.symmetric import SymmetricMemoryTransport
from shardlite.transport.works import end_waits

__all__ = [
    "Around",
    "Board",
    "Choice",
    "choose",
    "Completed",
    "connect",
    "connect_hosts",
    "Counted",
    "defer_interrupts",
    "end_waits",
    "Groups",
    "groups_of",
    "GroupTransport",
    "local_world",
    "Loan",
    "LocalTransport",
    "meet",
    "Message",
    "NcclTransport",
    "Notes",
    "Pending",
    "Ranks",
    "SharedBoard",
    "SharedMemoryTransport",
    "StagedTransport",
    "StoreBoard",
    "SymmetricMemoryTransport",
    "Tally",
    "tell",
    "tell_of_the_end",
    "TIMEOUT",
    "Transport",
]
