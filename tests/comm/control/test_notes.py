"""Failure reports that ranks leave for each other."""

import threading
import time

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from shardlite.comm.control import failure_reports
from shardlite.comm.control.failure_reports import FailureReports
from shardlite.comm.operation import Operation, Running
from shardlite.errors import CommError, DesyncError
from tests.comm.control.boards import SharedBoard


class Clock:
    """Time that passes only in `sleep`; `then` is what another rank does meanwhile."""

    def __init__(self):
        self.now = 0.0
        self.then = lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.then()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(failure_reports, "time", clock)
    return clock


def test_a_note_that_comes_late_is_told(clock):
    board = SharedBoard()
    own, other = (FailureReports(board, rank, 2) for rank in range(2))
    clock.then = lambda: other.leave("its forward at step 3") if clock.now > 1 else None
    assert own.compare("all-gather at step 3", "too late") == "\n  Meanwhile rank 1: its forward at step 3"
    assert clock.now < 2


def test_who_says_nothing_is_waited_for_once(clock):
    own = FailureReports(SharedBoard(), rank=0, world_size=3)
    told = own.compare("all-gather at step 3", "too late")
    assert told.count("has said nothing") == 2
    waited = clock.now
    assert 2 < waited < 2.1
    assert own.compare("reduce-scatter at step 3", "too late") == told
    assert clock.now == waited
    assert own.failed == "all-gather at step 3: too late"


def test_the_first_note_stays(clock):
    board = SharedBoard()
    own, other = (FailureReports(board, rank, 2) for rank in range(2))
    own.leave("all-gather at step 3")
    own.leave("reduce-scatter at step 3")
    assert other.compare("", "too late") == "\n  Meanwhile rank 0: all-gather at step 3"
    own.withdraw()
    own.leave("reduce-scatter at step 4")
    assert other.compare("", "too late") == "\n  Meanwhile rank 0: reduce-scatter at step 4"
    own.fail("an all-gather at step 4")
    own.withdraw()
    assert other.compare("", "too late") == "\n  Meanwhile rank 0: reduce-scatter at step 4", "it has failed for good"


def test_an_error_is_logged_before_the_others_are_asked(clock, caplog):
    class Gone(SharedBoard):
        def read(self, rank):
            assert "all-gather at step 3: too late" in caplog.text
            raise CommError("the store does not answer")

    told = FailureReports(Gone(), rank=0, world_size=2).compare("all-gather at step 3", "too late")
    assert told == " (What other ranks were doing is not known: the store does not answer)"


def test_a_rank_that_is_gone_is_not_waited_for(clock):
    board = SharedBoard()
    board.put(2, "its forward at step 3 ended in ArithmeticError: bad")  # it has said why
    own = FailureReports(board, rank=0, world_size=3, is_gone=lambda rank: rank > 0)
    assert own.compare("all-gather at step 3", "rank 1 is gone") == (
        "\n  Meanwhile rank 1: has said nothing; its process has ended"
        "\n  Meanwhile rank 2: its forward at step 3 ended in ArithmeticError: bad"
    )
    assert clock.now < 0.1


def test_the_first_error_is_in_the_file_that_torchrun_reads(clock, tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    own = FailureReports(SharedBoard(), rank=0, world_size=2)
    own.compare("all-gather at step 3", "rank 1 is gone")
    own.compare("reduce-scatter at step 3", "rank 1 is gone")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"] == "CommError: all-gather at step 3: rank 1 is gone"
    assert list(tmp_path.iterdir()) == [file]


def test_two_queues_that_fail_at_once_write_one_error(clock, tmp_path, monkeypatch):
    """Of two that write to one file at once, `torchrun` reads a mixture, and ends the run."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    own, written = FailureReports(SharedBoard(), rank=0, world_size=2), []
    record = ErrorHandler.record_exception

    def slowly(handler, error):
        written.append(error)
        if len(written) == 1:
            second.start()
            second.join(0.1)  # it waits for this one
        record(handler, error)

    monkeypatch.setattr(ErrorHandler, "record_exception", slowly)
    second = threading.Thread(target=own.compare, args=("reduce-scatter at step 3", "rank 1 is gone"))
    own.compare("all-gather at step 3", "rank 1 is gone")
    second.join()
    assert [str(error) for error in written] == ["all-gather at step 3: rank 1 is gone"]


def test_an_operation_of_a_rank_that_has_failed_waits_for_the_verdict():
    board = SharedBoard()
    own, other = (FailureReports(board, rank, 2) for rank in range(2))
    other.leave("its forward at step 3")
    failed, verdict = threading.Event(), DesyncError("ranks have taken different numbers of steps")

    def decide():
        with own.deciding:
            own.compare("the end of a pass", "it differs")
            failed.set()
            time.sleep(0.2)  # the other thread is in its operation
            own.verdict = verdict

    queue = threading.Thread(target=decide)
    queue.start()
    failed.wait()
    with pytest.raises(DesyncError, match="different numbers of steps"), Running(Operation(reports=own), torch.ones(1)):
        pass
    queue.join()
