"""Stretches of flat CPU tensors on as many threads of Python as PyTorch has for one operator.

A chunk that stays in the cache of one core is too short for an operator to be worth several threads. So each thread
takes chunks of its own: operators release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from threading import Barrier

import torch

from .launch import GROUP


def on_threads(numel: int, at_least: int, work: Callable[[int, int], None]) -> None:
    """Call `work(start, stop)` for stretches that cover `numel` elements, all at once, and return when all have.

    There are as many as PyTorch has threads, and fewer where one would be shorter than `at_least`. Each starts at a
    multiple of 32.

    Raises:
        Exception: the first that a stretch raised.
    """
    threads = min(torch.get_num_threads(), numel // at_least)
    if threads < 2:
        work(0, numel)
        return
    size = -(-numel // (threads * GROUP)) * GROUP
    running = [
        _pool(torch.get_num_threads()).submit(_without_graph, work, start, min(start + size, numel))
        for start in range(0, numel, size)
    ]
    wait(running)
    for stretch in running:
        stretch.result()


def _without_graph(work: Callable[[int, int], None], start: int, stop: int) -> None:
    with torch.no_grad():  # the caller's mode is its thread's
        work(start, stop)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which operators take one thread each."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="shardlite-step")
    together = Barrier(threads)  # one that is done already would take the task of another

    def start() -> None:
        together.wait()
        torch.get_num_threads()  # takes the process's number, which the first operator would do otherwise
        torch.set_num_threads(1)

    wait([pool.submit(start) for _ in range(threads)])
    torch.set_num_threads(threads)  # what threads that others start later are to find
    return pool


if hasattr(os, "register_at_fork"):  # a child has the pool and not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
