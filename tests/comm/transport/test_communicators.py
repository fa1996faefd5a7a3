"""Communicators of a simulated NCCL: options, reuse, and registered memory."""

import gc
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardlite import LayoutError, Route, ShardLite
from shardlite.comm import context
from shardlite.comm.transport import nccl
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.comm.transport.select import connect, connect_hosts
from shardlite.errors import CommError
from shardlite.lab.fake.fake_group import as_over_nccl, fake_group
from tests.support.internals import context as context_of
from tests.support.patience import seconds

CUDA = torch.device("cuda", 0)
AMPLE = timedelta(seconds=seconds(30))
UNSET = -(2**31)


class Options:
    """Options of NCCL, whose `config` is copied when it is set."""

    def __init__(self):
        self.is_high_priority_stream = False
        self._config = SimpleNamespace(min_ctas=UNSET, max_ctas=UNSET, net_name=None)

    @property
    def config(self):
        return self._config

    @config.setter
    def config(self, config):
        self._config = copy(config)


class FakeNccl(dist.ProcessGroupGloo):
    """A backend that plays NCCL's: gloo, so that ranks which do not agree on a name never return."""

    Options = Options
    made: ClassVar[list["FakeNccl"]] = []

    def __init__(self, store, rank, size, options):
        super().__init__(store, rank, size, AMPLE)
        self.barrier().wait()  # or a rank might close it while its peer is not connected yet
        self.said, self.calls = (rank, size, options), []
        self.made.append(self)

    def eager_connect_single_device(self, device):
        self.calls.append(("connect", device))

    def allocate_tensor(self, size, *, dtype, device):
        self.calls.append(("allocate", size, dtype, device))
        return torch.empty(size, dtype=dtype)

    def shutdown(self):
        self.calls.append("shutdown")


class Theirs:
    """The backend of the process group."""

    def __init__(self, refusing=(), **config):
        self.options = Options()
        vars(self.options.config).update(config)
        self._refusing = refusing

    @property
    def mem_allocator(self):
        if dist.get_rank() in self._refusing:
            raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")
        return object()


@contextmanager
def over_nccl(**theirs):
    """Within the block, the group has NCCL for CUDA tensors. Yield the backends that are made."""
    theirs = Theirs(**theirs)
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", FakeNccl, create=True),
        mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=theirs),
        mock.patch("torch.distributed.get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(nccl, "_all", []),
        mock.patch.object(FakeNccl, "made", []),
        mock.patch("atexit.register"),
    ):
        yield FakeNccl.made


def a_model(group, **route):
    """Return the transports of a model for gathers and for reductions."""
    return [connect(group, CUDA, AMPLE, route=Route(**route), apart=True) for _ in range(2)]


def names(transports):
    return [each._communicator.name for each in transports]


# ---- which are used again -------------------------------------------------------------------------------------------


def wrap_and_drop(group):
    with over_nccl() as made:
        used = [names(a_model(group)) for _ in range(20)]
        assert used == used[:1] * 20
        return len(made), used[0]


def test_a_model_has_the_communicators_of_one_that_is_gone(cluster):
    (first, used), (second, also) = cluster.run(wrap_and_drop, 2)
    assert first == second == 2
    assert used == also
    assert len({*used}) == 2


def test_one_that_another_rank_still_uses_is_not_taken(group):
    """Rank 1 has garbage that rank 0 has collected."""
    with over_nccl() as made:
        first = a_model(group)
        former, garbage = names(first), first if dist.get_rank() else []
        first = None
        second = a_model(group)
        assert not {*names(second)} & {*former}
        garbage.clear()
        third = a_model(group)
        assert names(third) == former
        fourth = a_model(group)
        assert (len(made), len({*names(second), *names(third), *names(fourth)})) == (6, 6)


def test_one_in_which_an_operation_may_still_wait_is_not_taken(group):
    """Rank 0 has started an operation that rank 1 never starts, as after a forward that failed on one rank."""
    with over_nccl() as made:
        gathers, reductions = a_model(group)
        former = names([gathers, reductions])
        gathers._communicator.operations += dist.get_rank() == 0
        reductions._communicator.operations += 7
        del gathers, reductions
        later = names(a_model(group))
        assert later[0] == former[1]
        assert later[1] != former[0]
        assert len(made) == 3


def test_ranks_route_and_timeout_must_be_equal(group):
    with over_nccl() as made:
        for route in ({}, {"max_ctas": 4}, {"high_priority": False}, {"transport": "p2p"}):
            a_model(group, **route)
        connect(dist.new_group([0, 1]), CUDA, AMPLE, apart=True)  # equal ranks: another group will do
        connect(group, CUDA, 2 * AMPLE, apart=True)
        count = len(made)
    with over_nccl(max_ctas=2) as made:
        a_model(group)
        assert (count, len(made)) == (9, 2)


def test_after_a_failure_all_are_free(group):
    with over_nccl():
        a_model(group)
        free = [each for each in nccl._all if each.is_free]
        with mock.patch.object(nccl, "_agree", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
            connect(group, CUDA, AMPLE, apart=True)
        assert len(free) == 2
        assert [each for each in nccl._all if each.is_free] == free


def test_one_is_free_when_garbage_is_collected(group):
    with over_nccl():
        model = SimpleNamespace(transports=a_model(group))
        model.itself = model
        del model
        before = [each.is_free for each in nccl._all]
        gc.collect()
        assert (before, [each.is_free for each in nccl._all]) == ([False] * 2, [True] * 2)


def test_what_the_backend_says_is_reported(group):
    expected = rf"^rank {group.rank()} cannot open another connection to ranks \[0, 1\] over nccl\. "
    with over_nccl(), mock.patch.object(FakeNccl, "__init__", side_effect=RuntimeError("no route to host")):
        with pytest.raises(CommError, match=rf"(?s){expected}.*The backend reports: no route to host$"):
            connect(group, CUDA, AMPLE, apart=True)


# ---- who has one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["collectives", "p2p"])
def test_gathers_and_reductions_have_their_own_and_inline_operations_that_of_the_program(transport):
    with fake_group(2), as_over_nccl(), mock.patch.object(context, "connect", side_effect=context.connect) as connected:
        model = ShardLite(torch.nn.Linear(4, 4), route=Route(transport=transport))
        apart = [call.kwargs.get("apart", False) for call in connected.call_args_list]
    own = context_of(model)
    assert apart == [True, False, True]
    assert len({own.transport, own.inline[0], own.reducing[0]}) == 3


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "priority", "min_ctas", "max_ctas"),
    [({}, True, 8, 16), ({"max_ctas": 12}, True, 8, 12), ({"max_ctas": 4, "high_priority": False}, False, 4, 4)],
)
def test_they_have_the_options_of_the_group_and_the_route_and_are_closed(group, route, priority, min_ctas, max_ctas):
    with over_nccl(max_ctas=16, min_ctas=8, net_name="IB") as made:
        a_model(group, **route)
        nccl._close()
    (rank, size, options), _ = said = [each.said for each in made]
    assert [each.calls for each in made] == [["shutdown"]] * 2
    assert len({each.group_name for _, _, each in said}) == 2
    assert (rank, size, options._timeout) == (group.rank(), 2, AMPLE)
    assert vars(options.config) == {"min_ctas": min_ctas, "max_ctas": max_ctas, "net_name": "IB"}
    assert options.is_high_priority_stream == priority
    assert options.global_ranks_in_group == [0, 1]
    assert options.group_name.startswith("shardlite ")


NCCL_ONLY = [{"registered": True}, {"max_ctas": 4}, {"high_priority": False}]


def connect_hosts_for(group, route):
    return type(connect_hosts(group, AMPLE, route=Route(**route))).__name__


@pytest.mark.parametrize("route", NCCL_ONLY, ids=str)
def test_options_are_for_nccl_alone(cluster, route):
    ((name, value),) = route.items()
    for kind, message in cluster.failures(connect_over_gloo, 2, route):
        assert kind == "LayoutError"
        assert message == (
            f"Route({name}={value}) configures communicators of NCCL, but these tensors go over "
            "SharedMemoryTransport, because all ranks are processes of this host: remove it"
        )
    assert cluster.run(connect_hosts_for, 2, route) == ["SharedMemoryTransport"] * 2


def connect_over_gloo(group, route):
    ShardLite(torch.nn.Linear(4, 4), group=group, route=Route(**route))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"registered": 1}, TypeError, "registered must be True or False, got 1"),
        ({"high_priority": "yes"}, TypeError, "high_priority must be True or False, got 'yes'"),
        ({"max_ctas": True}, TypeError, "max_ctas must be a number of thread blocks or None, got True"),
        ({"max_ctas": 2.0}, TypeError, "max_ctas must be a number of thread blocks or None, got 2.0"),
        ({"max_ctas": 0}, ValueError, "max_ctas must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(options, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        Route(**options)


def test_a_model_takes_a_route(group):
    model = ShardLite(torch.nn.Linear(4, 4), group=group, route=Route(transport="p2p", algorithm="direct"))
    assert "transport=GlooTransport, algorithm=direct" in repr(model)


# ---- registered memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [True, False])
def test_buffers_that_are_kept_are_registered_with_the_communicator_that_sends_them(group, registered):
    calls = [("connect", CUDA), ("allocate", 24, torch.uint8, CUDA)]
    with over_nccl() as made:
        transports = a_model(group, registered=registered)
        inline = connect(group, CUDA, AMPLE, route=Route(registered=registered))
        on_cpu = torch.device("cpu")
        memory = [each.empty_persistent(24, on_cpu) for each in (*transports, inline)]
        assert all((each.numel(), each.dtype) == (24, torch.uint8) for each in memory)
        assert [each.calls for each in made] == [calls if registered else []] * 2


def test_a_rank_without_the_allocator_is_an_error_on_all(group):
    with over_nccl(refusing=(1,)), pytest.raises(LayoutError, match=r"Remove registered=True$") as failed:
        connect(group, CUDA, AMPLE, route=Route(registered=True), apart=True)
    assert str(failed.value).startswith(
        "Route(registered=True) requires NCCL's allocator, which is not available. The backend reports on rank 1: NCCL "
        "mem allocator is not supported in this NCCL version. "
    )


# ---- order ----------------------------------------------------------------------------------------------------------


@contextmanager
def on(stream, *, captured=False):
    """Let a stream be the current one."""
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=captured),
    ):
        yield


def test_every_exchange_counts(group):
    """A rank whose messages are empty begins as many operations as the others."""
    with over_nccl(), on(None):
        transport = connect(group, CUDA, AMPLE, route=Route(transport="p2p"), apart=True)
        assert isinstance(transport, NcclTransport)
        transport.exchange([], tag=0).wait()
        assert transport._communicator.operations == 1
