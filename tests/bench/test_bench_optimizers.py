"""The bench of Muon: rows are complete, a wrong result is found on every rank, and bytes are counted."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim import Muon, _muon

from bench.optimizers import run
from bench.optimizers.builds import MUON, OF_FSDP2, OURS, SYSTEMS, build_ddp, build_shardlite
from bench.optimizers.check import verify
from bench.optimizers.peers import PEERS
from bench.optimizers.wire import Sent, sent_in_update
from shardlite.lab.compared.check import ResultError
from shardlite.lab.compared.workloads import gpt, perceptrons
from shardlite.lab.table import read_rows, render
from shardlite.lab.train.settings import GPTConfig
from tests.support.ranks.scripts import run_command

WIDTH = 32
TINY = perceptrons("tiny", blocks=2, width=WIDTH, batch=4)
TINY_GPT = gpt("tiny gpt", GPTConfig(layers=1, width=WIDTH, heads=2, context=8), batch=2)
KEYS = set(
    """
    bench model words parameters units optimizer ranks threads rounds machine torch python date system tolerance_used
    ms_p20 ms_p50 ms_p80 cpu_ms_p50 ms_above_floor above_floor_vs_ddp above_floor_vs_fsdp2 fastest_fsdp2
    cpu_ms_above_floor cpu_above_floor_vs_ddp cpu_above_floor_vs_fsdp2 optimizer_bytes peak_bytes activation_bytes
    """.split()  # noqa: SIM905
)
CHOSEN = ["floor", "ddp", "dtensor", "stage2", "stage3"]


def test_the_command_has_a_row_for_each_system(cluster, tmp_path):
    options = ["--ranks", "2", "--model", "tiny", "--steps", "1", "--systems", *CHOSEN, "--out", tmp_path]
    first, second = run_command(cluster, run.main, *options)
    assert first.status == second.status == 0
    assert second.out == ""
    rows = {row["system"]: row for row in read_rows(tmp_path.glob("*.jsonl"))}
    assert [*rows] == CHOSEN
    assert render([*rows.values()]) in first.out
    for row in rows.values():
        assert set(row) == KEYS
        assert 0 < row["tolerance_used"] <= 1
        assert row["fastest_fsdp2"] == "dtensor"
    assert rows["dtensor"]["above_floor_vs_fsdp2"] == rows["ddp"]["above_floor_vs_ddp"] == 1
    assert rows["floor"]["optimizer_bytes"] == rows["ddp"]["optimizer_bytes"] == 0
    for name in OURS:  # the cut between two ranks is between the matrices of a block
        assert rows[name]["optimizer_bytes"] == 0


# ---- results --------------------------------------------------------------------------------------------------------


class HalfByHalf(Muon):
    """Orthogonalizes each half of a matrix by itself, as a Muon does that takes shards for matrices."""

    def step(self, closure=None):
        whole = _muon._zeropower_via_newtonschulz

        def by_halves(grad, *options):
            return torch.cat([whole(half, *options) for half in grad.chunk(2)])

        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", by_halves):
            super().step()


def _changed(workload, group, **options):
    trainer = build_ddp(workload, group)
    trainer.optimizer.param_groups[0].update(options)
    return trainer


def _by_halves(workload, group):
    with mock.patch("bench.optimizers.builds.Muon", HalfByHalf):
        return build_ddp(workload, group)


WRONG = {
    "learning rate": partial(_changed, lr=1.1 * MUON["lr"]),
    "momentum": partial(_changed, nesterov=False),
    "coefficients": partial(_changed, ns_coefficients=(3, -3.2, 1.2)),
    "iterations": partial(_changed, ns_steps=4),
    "shards": _by_halves,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_is_found_on_every_rank(group, wrong):
    with pytest.raises(ResultError, match="wrong on tiny is"):
        verify(TINY, {"ddp": build_ddp, "wrong": WRONG[wrong]}, group)


def test_shardlite_has_the_bits_of_ddp_on_two_ranks(group):
    def build_wrong(workload, group):
        trainer = build_shardlite(workload, group, stage=3)
        trainer.optimizer.param_groups[0]["lr"] *= 1 + 2**-20
        return trainer

    with pytest.raises(ResultError, match=r"stage3 on tiny does not have the bits of ddp; different on .*rise.weight"):
        verify(TINY, {"ddp": build_ddp, "stage3": build_wrong}, group)


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("package", PEERS)
def test_a_package_has_the_result_of_pytorch(group, package):
    pytest.importorskip(package)
    with torch.compiler.set_stance("force_eager"):
        assert verify(TINY, {"ddp": build_ddp, package: OF_FSDP2[package]}, group)[package] <= 1
        run.measure(TINY, {"floor": SYSTEMS["floor"], "ddp": build_ddp, package: OF_FSDP2[package]}, 1, group)


# ---- floor and bytes ------------------------------------------------------------------------------------------------


def test_bytes_of_whole_parameters_are_counted(group):
    trainer = build_shardlite(TINY_GPT, group, stage=3)
    trainer.backward(TINY_GPT.batch(group.rank(), 0))
    sent = torch.tensor(sent_in_update(trainer, group.rank(), 2))
    dist.all_reduce(sent, group=group)
    matrices = 12 * WIDTH**2
    assert 0 < sent <= 2 * 2 * matrices / 2  # less than half of each, to owners and back, in bf16


def test_bytes_of_collectives_are_counted(group):
    rank, sent = group.rank(), Sent(group.rank(), 2)
    ten, parts = torch.zeros(10), [torch.zeros(10), torch.zeros(10)]
    found = []
    with sent:
        for call in (
            lambda: dist.all_to_all([torch.empty(10), torch.empty(10)], parts, group=group),
            lambda: dist.gather(ten, parts if rank == 0 else None, group_dst=0, group=group),
            lambda: dist.scatter(ten, parts if rank == 1 else None, group_src=1, group=group),
        ):
            before = sent.nbytes
            call()
            found.append(sent.nbytes - before)
    assert found == [40, 40 * (rank == 1), 40 * (rank == 1)]
