"""How bytes get from rank to rank. Parameters and gradients travel by this package only."""

from shardlite.transport.base import Completed, Message, Pending, Transport
from shardlite.transport.connect import connect, connect_hosts
from shardlite.transport.counted import Counted, Tally
from shardlite.transport.group import GroupTransport
from shardlite.transport.local import LocalTransport, local_world
from shardlite.transport.nccl import NcclTransport
from shardlite.transport.notes import Board, Notes, SharedBoard, StoreBoard
from shardlite.transport.ranks import Groups, Ranks, groups_of
from shardlite.transport.staged import StagedTransport

__all__ = [
    "Board",
    "Completed",
    "connect",
    "connect_hosts",
    "Counted",
    "Groups",
    "groups_of",
    "GroupTransport",
    "local_world",
    "LocalTransport",
    "Message",
    "NcclTransport",
    "Notes",
    "Pending",
    "Ranks",
    "SharedBoard",
    "StagedTransport",
    "StoreBoard",
    "Tally",
    "Transport",
]
