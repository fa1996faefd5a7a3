"""Ranks of a ring in one process, of which one runs at a time: which one is drawn, and depends on no clock.

Each rank is a thread. It gives its turn away wherever ranks can notice each other, at the atomic operations of
`signals.py`: before and after it sets a flag (`atomic_xchg`), and before it looks at one (`atomic_add` of 0). Who goes
on is drawn from a seeded generator. So ranks overtake each other at every place where they can, which happens to
processes almost never. A rank that has seen a flag in vain is not drawn before the flag changes, so waiting costs no
time; if no flag of any rank changes, all are drawn, and come to the end of their patience.
"""

import ctypes
import random
import threading
from contextlib import contextmanager

from triton._C.libtriton.ir import ATOMIC_OP
from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

from tests.kernels.interpreted.language import quicken


class _Over(BaseException):
    """Another rank has failed."""


class Turns:
    """Who of `world` ranks runs."""

    def __init__(self, world, seed):
        self._random = random.Random(seed)
        self._wake = [threading.Semaphore(0) for _ in range(world)]
        self._running = set(range(world))
        self._seen = [None] * world  # in the wait that a rank is in: the address of its flag, and what stood there
        self._late = set()
        self._here = threading.local()
        self._failure = None

    def late(self, rank, late):
        """Choose `rank` only while all others wait, if it is `late`."""
        (self._late.add if late else self._late.discard)(rank)

    def run(self, body):
        """Return `body(rank)` of each rank, or raise the first error."""
        results = [None] * len(self._wake)
        threads = [
            threading.Thread(target=self._rank, args=(body, rank, results), daemon=True) for rank in range(len(results))
        ]
        quicken()
        with self._switching():
            for thread in threads:
                thread.start()
            self._wake[0].release()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def _rank(self, body, rank, results):
        self._here.rank = rank
        self._wake[rank].acquire()
        try:
            results[rank] = body(rank)
        except _Over:
            pass
        except BaseException as error:
            self._failure = error
        self._running.discard(rank)
        if self._running:
            self._wake[self._chosen()].release()

    def _switch(self):
        """Let a rank go on, this one or another."""
        rank, chosen = self._here.rank, self._chosen()
        if chosen != rank:
            grid = interpreter_builder.grid_idx, interpreter_builder.grid_dim
            self._wake[chosen].release()
            self._wake[rank].acquire()
            interpreter_builder.grid_idx, interpreter_builder.grid_dim = grid
        if self._failure is not None:
            raise _Over

    def _chosen(self):
        """Draw from those that are not late and may find news. If there are none, from those that are late."""
        news = [rank for rank in self._running if self._may_find_news(rank)]
        prompt = [rank for rank in news if rank not in self._late]
        return self._random.choice(prompt or news or sorted(self._running))

    def _may_find_news(self, rank):
        if self._seen[rank] is None:
            return True
        address, value = self._seen[rank]
        return ctypes.c_int64.from_address(address).value != value

    @contextmanager
    def _switching(self):
        operate, barrier = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_barrier

        def operate_and_switch(builder, operation, pointer, *given):
            assert operation in (ATOMIC_OP.ADD, ATOMIC_OP.XCHG), f"{operation} is neither a look nor a signal"
            self._switch()
            result = operate(builder, operation, pointer, *given)
            if operation == ATOMIC_OP.ADD:
                self._seen[self._here.rank] = int(pointer.data.item()), int(result.data.item())
            else:
                self._switch()
            return result

        def barrier_and_forget(builder):
            self._seen[self._here.rank] = None  # there is one at the end of a wait
            return barrier(builder)

        InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_barrier = operate_and_switch, barrier_and_forget
        try:
            yield
        finally:
            InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_barrier = operate, barrier
