"""How bytes get from rank to rank. The only package that knows process groups."""

from shardlite.transport.base import Completed, Pending, Transport
from shardlite.transport.group import GroupTransport
from shardlite.transport.local import LocalTransport, local_world

__all__ = ["Completed", "GroupTransport", "LocalTransport", "Pending", "Transport", "local_world"]
