"""A loaded run continues with the same bits on as many ranks, and from the same state on other numbers of ranks."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh

from shardlite import EMA, AdamW, CheckpointError, Precision, ShardLite, async_save, load, save
from shardlite.checkpoint import Checkpoint, latest
from shardlite.checkpoint.reading import read_metadata
from shardlite.optim.layout import OptimizerLayout
from shardlite.telemetry import Meter
from tests.support.checkpoints import OPTIMIZERS, Net, Run, assert_names, names_in, same_state
from tests.support.twins.sharded import same_bits, slow, take_step

# ---- as many ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "state", "optimizer", "options"),
    [
        (2, "fp32", "ours", {}),
        (2, "bf16", "ours", {"stage": 1}),
        (3, "int8", "ours", {"stage": 2}),
        (2, "fp32", "in_backward", {}),
        (2, "fp32", "momentum", {"stage": 0}),
        (1, "fp32", "foreach", {}),
        slow(2, "int8", "ours", {}),
        slow(2, "int8", "ours", {"stage": 0}),
        slow(2, "fp32", "fused", {"stage": 1}),
        slow(4, "bf16", "ours", {}),
        slow(3, "fp32", "foreach", {}),
        slow(2, "fp32", "ours", {"precision": Precision(quantized_gather=True)}),
    ],
    indirect=["group"],
)
@pytest.mark.sample(2)
def test_a_run_goes_on_with_the_same_bits(group, path, state, optimizer, options):
    """20 steps straight are 10 steps, a checkpoint, and 10 more."""
    straight = Run(group, state, OPTIMIZERS[optimizer], **options).train(range(10))
    place = straight.save(path, step=10)
    assert place == path / "step-00000010" == latest(path)
    straight.train(range(10, 20))
    resumed = Run(group, state, OPTIMIZERS[optimizer], seed=1, **options)
    random.seed(3)
    found = resumed.load(path)
    assert found["rank"] == resumed.rank
    assert found["nested"]["data"] == [1, (2.5, "x")]
    assert found["nested"]["t"].tolist() == [1, 1]
    assert found["schedule"] is resumed.schedule
    resumed.train(range(10, 20)).assert_like(straight)


@pytest.mark.ranks(4)
def test_replicas_are_saved_once_and_loaded_by_all(group: Any, path: Path) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    straight = Run(mesh).train(range(2))
    straight.save(path)
    straight.train(range(2, 4))
    resumed = Run(mesh, seed=1)
    assert resumed.load(path)["rank"] == dist.get_rank(group)
    resumed.train(range(2, 4)).assert_like(straight)


# ---- others ----------------------------------------------------------------------------------------------------------


def saved_body(group: Any, path: Path, state: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train and save; return the whole model."""
    run = Run(group, state, **options).train(range(3))
    run.save(path)
    return run.model.full_state_dict()


def loaded_body(group: Any, path: Path, again: Path, state: str, options: dict[str, Any]) -> dict[str, Tensor]:
    run = Run(group, state, seed=1, **options)
    before = torch.get_rng_state()
    assert run.load(path)["rank"] == 0
    assert torch.equal(torch.get_rng_state(), before)
    run.save(again)
    return run.model.full_state_dict()


def whole_moments_body(group: Any, path: Path) -> dict[str, Any]:
    run = Run(group, stage=0, seed=2)
    run.load(path)
    run.model(torch.arange(6))
    return run.moments()


def by_twos(name: str, module: nn.Module) -> bool:
    return name in ("blocks", "table")


@pytest.mark.parametrize(
    ("ranks", "state", "options", "others"),
    [
        (4, "fp32", {}, [(1, "fp32", {}), (2, "fp32", {"stage": 0}), (3, "fp32", {"units": by_twos, "stage": 2})]),
        (3, "int8", {"stage": 0}, [(2, "int8", {"stage": 3}), (1, "int8", {"stage": 1})]),
        (1, "fp32", {}, [(2, "fp32", {"stage": 1}), (4, "fp32", {"units": by_twos})]),
    ],
)
def test_any_number_of_ranks_stage_and_units_loads_it(cluster, tmp_path, ranks, state, options, others):
    """Going through another layout and back changes no bit of weights or moments."""
    expected = cluster.run(saved_body, ranks, tmp_path / "first", state, options)[0]
    moments = cluster.run(whole_moments_body, 1, tmp_path / "first")[0]
    for number, (world_size, other, changed) in enumerate(others):
        again = tmp_path / str(number)
        for got in cluster.run(loaded_body, world_size, tmp_path / "first", again, other, changed):
            same_state(expected, got)
        same_state(cluster.run(whole_moments_body, 1, again)[0], moments)


def formats_body(group: Any, path: Path, state: str) -> None:
    run = Run(group, state, seed=1)
    run.load(path)
    run.save(path.parent / state)


@pytest.mark.parametrize("state", [slow("bf16"), "int8"])
def test_a_state_goes_into_another_format_rounded_once(cluster, tmp_path, state):
    """fp32 to a narrow format and back: each moment is the nearest that the format has, and the second time itself."""
    cluster.run(saved_body, 2, tmp_path / "first", "fp32", {})
    cluster.run(formats_body, 2, tmp_path / "first", state)
    cluster.run(formats_body, 2, tmp_path / state, "fp32")
    first = cluster.run(whole_moments_body, 1, tmp_path / "first")[0]
    once = cluster.run(whole_moments_body, 1, tmp_path / state)[0]
    for name, value in once.items():
        if name.endswith("exp_avg"):
            assert (value - first[name]).abs().max() <= first[name].abs().max() / 64, name
    cluster.run(formats_body, 2, tmp_path / "fp32", state)
    same_state(cluster.run(whole_moments_body, 1, tmp_path / state)[0], once)


def test_averages_go_with_a_run(group: Any, path: Path) -> None:
    """Averages are each rank's own extra."""
    run = Run(group).train(range(1))
    average = EMA(run.model, decay=0.5)
    run.train(range(1, 2))
    average.update()
    save(path, run.model, extra={"ema": average})
    expected = average.full_state_dict()
    other = Run(group, seed=1)
    fresh = EMA(other.model, decay=0.5)
    load(path, other.model, extra={"ema": fresh})
    for name, value in fresh.full_state_dict().items():
        if not name.startswith("norm."):
            same_bits(name, value, expected[name])


# ---- the folder of a run ---------------------------------------------------------------------------------------------


def test_steps_are_numbered_and_the_newest_are_kept(group: Any, path: Path) -> None:
    run, path = Run(group), path / "run"
    assert latest(path) is None
    assert run.save(path).name == "step-00000000"
    assert run.save(path, step=7).name == "step-00000007"
    run.train(range(1))
    assert run.save(path, keep=2).name == "step-00000008"
    assert names_in(path) == ["step-00000007", "step-00000008"]
    other = Run(group, seed=1)
    other.load(path / "step-00000008")
    other.assert_like(run)
    other.load(path / "step-00000007")
    assert not torch.equal(other.model.full_state_dict()["norm.running_mean"], torch.zeros(0))
    run.save(path, step=7, keep=1)  # an older one is written anew
    assert_names(group, path, "step-00000007")
    for number in range(10, 16):
        run.save(path, step=number, keep=4)
    kept = [f"step-000000{number}" for number in range(12, 16)]
    assert_names(group, path, *kept)
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        run.save(path, keep=0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        run.save(path, step=-1)
    with pytest.raises(TypeError, match=r"step must be an int, got"):
        run.save(path, step="5")
    with pytest.raises(CheckpointError, match=r"ranks were given different steps, \[0, 1\]"):
        run.save(path, step=dist.get_rank(group))
    for save_as in (save, async_save):
        with pytest.raises(CheckpointError, match=r"different values of keep, \[1, None\] by rank: pass the same"):
            save_as(path, run.model, run.optimizer, keep=1 if dist.get_rank(group) == 0 else None)
    assert_names(group, path, *kept)
    assert {each.name for each in path.glob(".*")} <= {".lease"}


def bytes_body(group: Any, path: Path) -> int:
    run = Run(group).train(range(1))
    place = run.save(path)
    return (place / f"__{dist.get_rank(group)}_0.distcp").stat().st_size


def test_each_rank_writes_what_it_holds_and_tied_weights_once(cluster, tmp_path):
    numel = sum(param.numel() for param in Net().parameters())  # tied ones count once
    for ranks in (1, 3):
        sizes = cluster.run(bytes_body, ranks, tmp_path / str(ranks))
        assert max(sizes) < 2 * min(sizes)  # rank 0 has hyper-parameters and buffers, too
        assert 12 * numel < sum(sizes) < 12 * numel + 300_000  # what PyTorch's format adds to each box
        places = read_metadata(tmp_path / str(ranks) / "step-00000000").storage_data
        tied = [{i.offset: p for i, p in places.items() if i.fqn == f"model.{n}.weight"} for n in ("table", "head")]
        assert tied[0] == tied[1] != {}


def test_state_of_a_parameter_outside_of_the_model_is_saved(group: Any, path: Path) -> None:
    def made() -> tuple[ShardLite, nn.Parameter, optim.Optimizer]:
        model, scale = ShardLite(nn.Linear(4, 4), stage=3, group=group), nn.Parameter(torch.ones(4))
        return model, scale, optim.AdamW([{"params": [*model.parameters(), scale]}], lr=0.1)

    model, scale, optimizer = made()
    (model(torch.ones(2, 4)) * scale).square().sum().backward()
    optimizer.step()
    save(path, model, optimizer)
    again, other, loaded = made()
    load(path, again, loaded)
    torch.testing.assert_close(loaded.state[other], optimizer.state[scale], rtol=0, atol=0)
    both = optim.AdamW([*model.parameters(), *again.parameters()])
    with pytest.raises(CheckpointError, match="Save the other model separately"):
        save(path, model, both)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes_are_named_on_every_rank_and_change_nothing(group: Any, path: Path) -> None:
    run, path = Run(group).train(range(1)), path / "run"
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {path}"):
        run.load(path)
    with pytest.raises(CheckpointError, match=r"'ranks.1.extra' holds something that is neither a tensor"):
        save(path, run.model, extra={"bad": object()} if dist.get_rank(group) else {})
    assert_names(group, path)
    save(path, run.model)
    with pytest.raises(CheckpointError, match="has no optimizer state: call load without an optimizer"):
        run.load(path)
    with pytest.raises(CheckpointError, match="some ranks were given an optimizer, and others were not"):
        save(path, run.model, run.optimizer if dist.get_rank(group) else None)
    with pytest.raises(TypeError, match="expected a ShardLite model, got Linear"):
        save(path, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"\(numpy\S+\)\. Loading it could execute code: convert it"):
        save(path, run.model, extra={"x": numpy.float64(2.0)})
    foreign = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(CheckpointError, match=r"has a parameter of shape \[2\] that is not one of"):
        save(path, run.model, foreign)
    run.save(path)
    before = run.model.full_state_dict()
    other = ShardLite(nn.Sequential(nn.Linear(3, 3)), group=group)
    with pytest.raises(
        CheckpointError, match=r"is of a different model: it lacks model.0.bias, model.0.weight and has"
    ):
        load(path, other)
    regrouped = AdamW(run.model.parameters())
    with pytest.raises(CheckpointError, match=r"groups of parameters differ from the saved ones"):
        load(path, run.model, regrouped)
    with pytest.raises(
        CheckpointError, match=r"has no state for extra\['scheduler'\], only for 'schedule', 'rank', 'nes"
    ):
        load(path, run.model, run.optimizer, {"scheduler": run.schedule})
    with pytest.raises(
        CheckpointError, match="a different optimizer: it lacks options dampening, momentum, nesterov of SGD"
    ):
        load(path, run.model, optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9))
    amsgrad = optim.AdamW(run.model.parameters(), amsgrad=True)
    same_state(run.model.full_state_dict(), before)
    run.model(torch.arange(6)).sum().backward()
    amsgrad.step()
    save(path, run.model, amsgrad)
    with pytest.raises(CheckpointError, match="an optimizer other than AdamW: it has exp_avg, exp_avg_sq, max_exp"):
        load(path, run.model, regrouped)

    save(path, ShardLite(nn.Linear(4, 4), group=group))
    with pytest.raises(CheckpointError, match=r"'model.weight' has shape \[4, 4\], but the model's has \[4, 5\]"):
        load(path, ShardLite(nn.Linear(5, 4), group=group))


class Views(nn.Module):
    """Buffers that share memory, an empty parameter, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(16.0).view(4, 4)
        for name, value in (("mask", mask), ("turned", mask.t()), ("first", mask[:1])):
            self.register_buffer(name, value)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale) + self.mask + self.empty.sum()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("optimizer", ["NAdam", "Adagrad", *map(slow, ("ASGD", "Rprop"))])
def test_buffers_that_share_memory_empty_parameters_and_scalars(group: Any, path: Path, optimizer: str) -> None:
    def make(seed: int) -> tuple[ShardLite, optim.Optimizer]:
        torch.manual_seed(seed)
        model = ShardLite(Views(), group=group)
        return model, getattr(optim, optimizer)(model.parameters(), lr=0.05)

    def train(model: ShardLite, its: optim.Optimizer) -> dict[str, Tensor]:
        take_step(its, model(torch.ones(4, 4)).square().sum())
        return model.full_state_dict()

    straight = make(0)
    train(*straight)
    save(path, *straight)
    other = make(1)
    load(path, *other)
    expected, got = train(*straight), train(*other)
    same_state(expected, got)


# ---- cost ------------------------------------------------------------------------------------------------------------

SIDE, DEPTH = 64, 16
TENSOR = 4 * SIDE * SIDE
"""Bytes of one weight of `deep` in fp32."""


def deep(group: Any, state: str) -> tuple[ShardLite, AdamW]:
    precision = Precision(compute=torch.bfloat16, master="split24") if state == "int8" else Precision()
    layers = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH)])
    model = ShardLite(layers, group=group, precision=precision)
    optimizer = AdamW(model.parameters(), state=state)
    model(torch.randn(2, SIDE).to(torch.bfloat16 if state == "int8" else None)).float().sum().backward()
    take_step(optimizer)
    return model, optimizer


@pytest.mark.parametrize("state", [slow("fp32"), "int8"])
def test_saving_and_loading_take_memory_for_one_tensor(group: Any, path: Path, state: str) -> None:
    """At most its two decoded moments, a copy for the file or from it, and the states of generators."""
    model, optimizer = deep(group, state)
    peaks = []
    for act in (save, load):
        with Meter() as meter:
            before = meter.live
            act(path, model, optimizer)
            peaks.append(meter.peak - before)
    assert max(peaks) <= 3 * TENSOR // 2 + 40_000 < DEPTH * TENSOR // 2


def bytes_read_body(group: Any, path: Path, again: bool) -> tuple[int, int]:
    """Return how many bytes a rank reads of other ranks' files, and how many there are."""
    model, optimizer = deep(group, "fp32")
    if not again:
        save(path, model, optimizer)
    checkpoint, size = Checkpoint(latest(path) or path), 0
    for name, target in model.state_dict().items():
        for item in checkpoint.items(f"model.{name}", target):
            place = checkpoint.place_of(item.storage_index)
            size += place.length if f"__{dist.get_rank(group)}_" not in place.relative_path else 0
    return size, DEPTH * TENSOR


def test_a_rank_reads_only_what_overlaps_its_part(cluster, tmp_path):
    assert [read for read, _ in cluster.run(bytes_read_body, 2, tmp_path, False)] == [0, 0]
    for read, whole in cluster.run(bytes_read_body, 4, tmp_path, True):
        assert 0 < read + 1 <= 0.6 * whole


class Pieces(nn.Module):
    """Many small parameters in one unit."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([*self.pieces]).mean(0) * x


def test_many_parameters_are_loaded_in_linear_time(group: Any, path: Path) -> None:
    """The number of comparisons does not depend on the number of parameters."""
    looks: list[int] = []
    for count in (10, 100):
        torch.manual_seed(0)
        model = ShardLite(Pieces(count), group=group)
        optimizer = AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        save(path / str(count), model, optimizer)
        fits = OptimizerLayout.fits
        with mock.patch.object(OptimizerLayout, "fits", autospec=True, side_effect=fits) as compared:
            load(path / str(count), model, optimizer)
        looks.append(compared.call_count)
    assert looks[0] == looks[1] < 5
