"""What `torch.distributed` works on, and its failures in our words. For the transports over process groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shardlite.errors import CommError, LayoutError
from shardlite.transport.base import Message


@dataclass(frozen=True)
class Posted:
    """Messages with what an error has to say: who exchanges what with whom, under which tag, within what time.

    Without a `timeout` it is the process group that decides how long a message may take.
    """

    rank: int
    messages: Sequence[Message]
    tag: int
    timeout: timedelta | None = None

    def failed(self, error: RuntimeError) -> CommError:
        """Return what the backend has raised in our words."""
        doing = " and ".join(dict.fromkeys(message.route for message in self.messages))
        nbytes = sum(message.tensor.nbytes for message in self.messages)
        limit = "" if self.timeout is None else f", timeout {self.timeout.total_seconds():g} s"
        return CommError(
            f"rank {self.rank} {doing} failed: {nbytes} bytes, tag {self.tag}{limit}. "
            f"The peer died, is late or does another operation. The backend says: {error}"
        )


@dataclass(frozen=True)
class InFlight:
    """Messages that the backend is working on; holds their tensors, because gloo keeps only the addresses."""

    works: Sequence[dist.Work]
    posted: Posted

    def wait(self) -> None:
        """Wait for all of them, each for at most the timeout."""
        limit = () if self.posted.timeout is None else (self.posted.timeout,)
        try:
            for work in self.works:
                if not work.wait(*limit):
                    raise RuntimeError("the operation was aborted")
        except RuntimeError as error:
            raise self.posted.failed(error) from error


def joined(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default one for `None`.

    Raises:
        LayoutError: this process is not a member.
    """
    if dist.get_rank(group) < 0:
        raise LayoutError("this process is not a member of the process group that it was given")
    everyone = dist.group.WORLD
    assert everyone is not None, "the rank was asked for above"
    return everyone if group is None else group
