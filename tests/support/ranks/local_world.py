"""Ranks inside one process: every rank is a thread, a message is a copy. For tests and experiments."""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

from torch import Tensor

from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.messages import Completed, Pending
from shardlite.errors import CommError
from tests.support.patience import seconds

_PATIENT = timedelta(seconds=seconds(30))

_Route = tuple[int, int, int]  # source rank, destination rank, tag


def local_world(
    world_size: int, *, timeout: timedelta = _PATIENT, delays: Sequence[float] = ()
) -> list["LocalTransport"]:
    """Return one transport per rank; run each in a separate thread.

    `delays[r]` delays rank `r`: it sleeps that many seconds before each message that it sends.
    """
    exchange = _Exchange()
    late = [*delays, *[0.0] * (world_size - len(delays))]
    return [LocalTransport(rank, world_size, exchange, timeout, late[rank]) for rank in range(world_size)]


class LocalTransport(Transport):
    """One rank of a `local_world`. A message is copied when it is sent, so sending never waits for the peer."""

    def __init__(self, rank: int, world_size: int, exchange: "_Exchange", timeout: timedelta, delay: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._exchange = exchange
        self._timeout = timeout
        self._delay = delay

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Copy `tensor` and deliver it to rank `peer`."""
        if self._delay:
            time.sleep(self._delay)
        self._exchange.deliver((self.rank, peer, tag), tensor.detach().clone())
        return Completed()

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Expect the next message with `tag` from rank `peer`."""
        route = (peer, self.rank, tag)
        return _Expected(self._exchange.expect(route), tensor, route, self._timeout)


@dataclass(frozen=True)
class _Expected:
    """A message that is expected and may not have been sent yet."""

    message: "Future[Tensor]"
    tensor: Tensor
    route: _Route
    timeout: timedelta

    def wait(self) -> None:
        try:
            received = self.message.result(self.timeout.total_seconds())
        except FutureTimeoutError as error:
            raise CommError(
                f"{self._words()} failed: nothing came within {self.timeout.total_seconds():g} s. "
                "The peer died, is late or does another operation."
            ) from error
        if (received.shape, received.dtype) != (self.tensor.shape, self.tensor.dtype):
            raise CommError(f"{self._words()} failed: the peer sent {received.numel()} elements of {received.dtype}")
        self.tensor.detach().copy_(received)

    def _words(self) -> str:
        source, destination, tag = self.route
        return (
            f"rank {destination} receiving from rank {source} "
            f"({self.tensor.numel()} elements of {self.tensor.dtype}, {self.tensor.nbytes} bytes, tag {tag})"
        )


class _Exchange:
    """Matches the n-th message sent on a route with the n-th one expected there, in whichever order they come."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sent: dict[_Route, deque[Future[Tensor]]] = defaultdict(deque)
        self._expected: dict[_Route, deque[Future[Tensor]]] = defaultdict(deque)

    def deliver(self, route: _Route, message: Tensor) -> None:
        with self._lock:
            self._rendezvous(route, self._expected, self._sent).set_result(message)

    def expect(self, route: _Route) -> "Future[Tensor]":
        with self._lock:
            return self._rendezvous(route, self._sent, self._expected)

    @staticmethod
    def _rendezvous(
        route: _Route, theirs: dict[_Route, deque["Future[Tensor]"]], ours: dict[_Route, deque["Future[Tensor]"]]
    ) -> "Future[Tensor]":
        """Take the oldest entry of the other side, or add one for it."""
        if theirs[route]:
            return theirs[route].popleft()
        future: Future[Tensor] = Future()
        ours[route].append(future)
        return future
