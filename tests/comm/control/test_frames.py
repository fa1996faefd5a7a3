"""Frames of other threads, read with the garbage collector off."""

import gc
import sys
import threading

import pytest

from shardlite.comm.control.frames import frame_of


@pytest.fixture
def collector():
    """Leave the garbage collector as it was."""
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("switch", [gc.enable, gc.disable])
def test_nothing_is_collected_meanwhile(switch, collector, monkeypatch):
    """Before Python 3.12 a finalizer that runs there may block the whole process."""
    current_frames, was_on, ready, end = sys._current_frames, [], threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (ready.set(), end.wait()))
    thread.start()
    ready.wait()
    monkeypatch.setattr(sys, "_current_frames", lambda: was_on.append(gc.isenabled()) or current_frames())
    switch()
    frame = frame_of(thread.ident)
    assert was_on == [False]
    assert gc.isenabled() == (switch is gc.enable)
    while frame.f_back is not None:
        frame = frame.f_back
    assert frame.f_code.co_name == "_bootstrap"
    end.set()
    thread.join()
    assert frame_of(thread.ident) is None


def test_the_frame_of_the_own_thread_is_the_callers():
    assert frame_of(threading.get_ident()) is sys._getframe()


def test_the_collector_stays_on_when_many_threads_read_frames(collector):
    gc.enable()
    main = threading.get_ident()
    threads = [threading.Thread(target=lambda: [frame_of(main) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(gc.isenabled() for _ in range(1000))
    for thread in threads:
        thread.join()
    assert gc.isenabled()
