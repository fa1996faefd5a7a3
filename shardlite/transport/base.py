"""What a collective may ask of a two-sided transport: who am I, send, receive, wait. Knows no process group."""

from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """One message in flight. It keeps its tensor alive; the caller keeps it untouched until `wait` has returned."""

    def wait(self) -> None:
        """Block until the tensor may be reused (sent) or read (received).

        Raises:
            CommError: the peer failed, sent something else, or stayed silent for longer than the transport's timeout.
        """


class Transport(Protocol):
    """Messages between ranks.

    Messages from one rank to another with the same tag arrive in the order sent; those with different tags do not meet.
    Tensors are contiguous and 1-D, of any dtype; sender and receiver agree on numel and dtype. Several threads may use
    one transport at once if their tags differ.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer`."""

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` into `tensor`."""


class Completed:
    """A `Pending` with nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""
