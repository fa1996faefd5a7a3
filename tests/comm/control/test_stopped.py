"""No call waits longer than `timeout` for a stopped peer, even if it serves the store of the process group."""

import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlite import AdamW, Route, ShardLite
from shardlite.errors import CommError
from tests.support.patience import seconds, until
from tests.support.twins.sharded import slow, take_step

LIMIT = timedelta(seconds=seconds(0.5))
X = torch.ones(4, 8)


class Run:
    """A model that has taken a step, over ranks of its own, and is ready for one of the `CALLS`."""

    def __init__(self, transport, call):
        self.transport = transport
        self.group, self.new_group = dist.new_group(), dist.new_group()
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.model = ShardLite(net, units=nn.Linear, route=Route(transport=transport), timeout=LIMIT, group=self.group)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        take_step(self.optimizer, self.model(X).sum())
        if call == "end_backward":
            self.loss = self.model(X).sum()
        if call == "clip":
            self.model(X).sum().backward()


def together(make):
    """Return the result of both ranks; if one of them was late by the whole `LIMIT`, both try again."""
    while True:
        try:
            made = make()
        except CommError as error:
            print(error, flush=True)  # for the log, if they never meet
            made = None
        late = torch.tensor(made is None, dtype=torch.int32)
        dist.all_reduce(late)
        if not late:
            return made


def wrap(run):
    ShardLite(nn.Linear(8, 8), route=Route(transport=run.transport), timeout=LIMIT, group=run.group)


def rendezvous(run):
    """Wrap over ranks that have no connections yet."""
    ShardLite(nn.Linear(8, 8), route=Route(transport=run.transport), timeout=LIMIT, group=run.new_group)


def train(run):
    run.model(X).sum().backward()


def end_backward(run):
    run.loss.backward()


def clip(run):
    run.model.clip_grad_norm_(1.0)


def evaluate(run):
    with torch.no_grad():
        run.model.eval()(X)


def join(run):
    next(run.model.join([X]))


def gather(run):
    with run.model.gathered():
        pass


def save(run):
    run.model.full_state_dict()


def load(run):
    run.model.load_full_state_dict({})


def resume(run):
    run.optimizer.load_state_dict(run.optimizer.state_dict())


CALLS = {each.__name__: each for each in (wrap, rendezvous, train, end_backward, clip, evaluate, join, gather)}
CALLS |= {each.__name__: each for each in (save, load, resume)}


def stopped_body(group, transport):
    """Stop rank 0, and return the error that each call raises on rank 1."""
    runs = {name: together(partial(Run, transport, name)) for name in CALLS}
    pid = Path(os.environ["TMPDIR"]).parent / "pid"
    if group.rank() == 0:
        pid.write_text(str(os.getpid()))
    dist.barrier()
    if group.rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    state = Path(f"/proc/{pid.read_text()}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    told = {}
    for name, call in CALLS.items():
        try:
            call(runs[name])
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


@pytest.mark.parametrize("transport", ["shared_memory", slow("p2p")])
def test_no_call_waits_for_a_stopped_peer(doomed, transport, tmp_path):
    """The timeout of the process group itself is longer than the ranks may live."""
    first, second = doomed.run(stopped_body, 2, transport, directory=tmp_path, killed=0, tcp_store=True)
    assert first.status == -signal.SIGKILL
    assert second.kind == "", f"{second.text}\n{second.log}"
    assert second.result.keys() == CALLS.keys()
    for call, error in second.result.items():
        assert error.startswith("CommError: "), f"{call}: {error}"
    assert "the store of the process group does not answer" in second.result["wrap"]
    assert "What other ranks were doing is not known" in second.result["train"]
