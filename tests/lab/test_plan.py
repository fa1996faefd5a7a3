"""`shardlite plan`: sources, traces, the smallest world, the simulation of a step, and what the command says."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardlite.cli import main
from shardlite.config import Precision
from shardlite.lab.plan.source import find_source
from shardlite.optimizers.assignment import Owned, describe
from shardlite.plan import (
    ACTIVATIONS,
    CARDS,
    CLUSTERS,
    Kind,
    LinkCost,
    Planner,
    Setting,
    Source,
    SourceError,
    memory_of,
    scaling,
    simulate,
)
from tests.support.models.residual import Chain

WIDTH = 16


def deep(blocks: int = 4) -> nn.Module:
    """Make blocks whose activations are known: each saves its input and the result of tanh, [B, WIDTH]."""
    return Chain((nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)), end=torch.sum)


def rows() -> torch.Tensor:
    return torch.zeros(32, WIDTH)


@pytest.fixture(scope="module")
def chain() -> Planner:
    return Planner(Source("chain", deep, lambda: (rows(),), "32 rows"))


@pytest.fixture(scope="module")
def demo() -> Planner:
    return Planner(find_source("demo-tiny", batch=2, context=None))


# ---- traces ---------------------------------------------------------------------------------------------------------


def test_activations_are_those_that_a_step_saves(chain):
    """At the end of the forward: the batch and 4 results of 2 KiB, the loss and its gradient."""
    events = chain.events(None, False)
    backward = next(event for event in events if event.kind is Kind.BACKWARD)
    tensor = 32 * WIDTH * 4
    assert backward.now == (1 + 4) * tensor + 4 + 4
    assert events[-1].now == tensor + 4  # the batch and the loss


def test_operations_are_counted_for_each_unit(chain):
    """A product of [32 x 16] and [16 x 16] forward, two backward, but for the batch, which needs no gradient."""
    product = 2 * 32 * WIDTH * WIDTH
    assert sum(event.flops for event in chain.events(None, False)) == (4 + 4 + 3) * product
    assert sum(event.flops for event in chain.events(None, True)) == (4 + 4 + 4 + 3) * product


def test_checkpointing_saves_activations_and_gathers_no_more(demo):
    setting = Setting(world_size=4)
    plain, recomputed = demo.plan(setting), demo.plan(replace(setting, checkpoint=True))
    assert recomputed.timeline.most[ACTIVATIONS] < plain.timeline.most[ACTIVATIONS]
    assert recomputed.sent_by_gathers == plain.sent_by_gathers


def test_weights_of_a_recomputed_block_stay_until_its_backward(chain):
    """In a backward each unit with weights to save is used once, without a break, and its gradients come inside."""
    events = chain.events(None, True)
    backward = next(i for i, event in enumerate(events) if event.kind is Kind.BACKWARD)
    users, begun = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    for event in events[backward:-1]:
        if event.kind is Kind.ENTER:
            begun[event.unit] += users[event.unit] == 0
            users[event.unit] += 1
        elif event.kind is Kind.LEAVE:
            users[event.unit] -= 1
    assert set(begun.values()) == {1}
    assert set(users.values()) == {0}


def test_a_smaller_dtype_halves_activations(chain):
    wide, narrow = (chain.plan(Setting(world_size=2, precision=Precision(compute=c))) for c in (None, torch.bfloat16))
    assert narrow.activations == pytest.approx(wide.activations / 2, abs=4)


@pytest.mark.parametrize("ranks", [2, 3, 64, 4096])
def test_every_stage_shards_what_it_says(demo, ranks):
    plans = [demo.plan(Setting(stage=stage, world_size=ranks)) for stage in range(4)]
    weights, moments = ([plan.budget.held[purpose] for plan in plans] for purpose in ("parameters", "optimizer state"))
    assert weights[0] == weights[1] == weights[2] > weights[3]
    assert moments[0] > moments[1] == moments[2] == moments[3]
    gradients = [plan.timeline.most["gradients"] for plan in plans]
    assert gradients[0] == gradients[1] > gradients[2] == gradients[3]
    assert all(plan.at_least <= plan.peak for plan in plans)


def test_the_smallest_world_fits_and_one_rank_less_does_not(demo):
    setting = Setting(on_gpu=False)
    limit = demo.plan(replace(setting, world_size=5)).peak
    fewest = demo.smallest_world(setting, limit)
    assert fewest is not None
    assert demo.plan(replace(setting, world_size=fewest)).peak <= limit
    assert demo.plan(replace(setting, world_size=fewest - 1)).peak > limit
    assert demo.smallest_world(setting, 1000) is None
    assert demo.smallest_world(setting, 10**12) == 1


# ---- time -----------------------------------------------------------------------------------------------------------


def test_a_step_is_computation_and_what_communication_leaves_exposed(demo):
    for cluster in CLUSTERS.values():
        for stage in (0, 3):
            alone = simulate(demo.plan(Setting(stage=stage)), cluster)
            assert alone.communication == 0
            assert alone.exposed == pytest.approx(0, abs=1e-12)
            step = simulate(demo.plan(Setting(stage=stage, world_size=16)), cluster)
            assert step.compute == alone.compute
            assert max(step.compute, step.communication) <= step.total
            assert step.total <= step.compute + step.communication + step.update + 1e-12


def test_a_free_network_scales_ideally_and_a_slow_one_as_amdahl_says(demo):
    plans = [demo.plan(Setting(world_size=ranks)) for ranks in (1, 2, 16)]
    fast, slow = CLUSTERS["dgx-h100"], CLUSTERS["ethernet-a100"]
    free = replace(fast, inside=LinkCost(0, 0, 0), nic=LinkCost(0, 0, 0), base=0.0)
    assert all(each.weak >= 1 and each.amdahl == 1 for each in scaling(plans[0], plans, free))
    first, *_, last = scaling(plans[0], plans, slow)
    assert first.weak == first.strong == first.amdahl == 1
    assert last.weak < 0.5
    assert last.strong == pytest.approx(last.amdahl, rel=0.1)  # next to nothing is overlapped


def test_across_nodes_a_ring_has_all_network_cards_and_an_exchange_its_own():
    cluster = CLUSTERS["dgx-h100"]
    assert cluster.ring(8) == cluster.exchange(8) == cluster.inside
    assert cluster.ring(16).beta == max(cluster.inside.beta, cluster.nic.beta / 8)
    assert cluster.exchange(16).beta == pytest.approx(cluster.nic.beta * 8 / 15)
    assert all(each.source for each in (*CARDS.values(), *CLUSTERS.values()))


# ---- sources --------------------------------------------------------------------------------------------------------


def test_a_model_by_import_path_with_its_own_inputs(tmp_path, monkeypatch):
    (tmp_path / "planned.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))\n"
        "def batch():\n    return torch.zeros(3, 4)\n"
        "def real():\n    return int(torch.ones(1).item()) and make()\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "planned", raising=False)
    planner = Planner(find_source("planned:make", 1, None, inputs="planned:batch"))
    assert planner.numel == 4 * 4 + 4 + 4 * 2 + 2
    assert planner.plan(Setting(world_size=2)).activations > 0
    with pytest.raises(SourceError, match="cannot be traced with fake tensors"):
        Planner(find_source("planned:real", 1, None))
    with pytest.raises(SourceError, match="is of type int; expected a function or class"):
        find_source("planned:number", 1, None)
    with pytest.raises(SourceError, match="has no attribute 'missing'"):
        find_source("planned:missing", 1, None)


@pytest.mark.parametrize(
    ("model", "context", "message"),
    [
        ("gpt5", None, "is neither a preset, nor a file, nor module:name; presets are gpt2, "),
        ("gpt2", 4096, "--context 4096 exceeds the 1024 positions"),
        ("nowhere:make", None, "No module named 'nowhere'"),
    ],
)
def test_models_that_are_not_there(model, context, message):
    with pytest.raises(ValueError, match=message):
        find_source(model, 1, context)


@pytest.mark.slow
def test_a_config_of_hugging_face(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers: `make test-all` installs it")
    config = tmp_path / "config.json"
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config.write_text(
        json.dumps({"model_type": "llama", **sizes, "num_attention_heads": 4, "max_position_embeddings": 16})
    )
    planner = Planner(find_source(str(tmp_path), 2, None))
    assert planner.numel == 2 * 96 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert planner.plan(Setting(world_size=2, checkpoint=True)).peak < planner.plan(Setting(world_size=1)).peak
    config.write_text("{}")
    with pytest.raises(SourceError, match="it has no model_type"):
        find_source(str(config), 2, None)


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    return main(["plan", "--model", "demo-tiny", "--batch", "2", *arguments])


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="--plots needs it")
    file, folder = tmp_path / "plan.json", tmp_path / "plots"
    options = ["--ranks", "1", "4", "--stage", "3", "--cluster", "dgx-a100", "--card", "4MB"]
    assert run(*options, "--json", str(file), "--plots", str(folder)) == 0
    printed = capsys.readouterr()
    assert "tracing a step ..." in printed.err
    for words in ("predictions, not measurements", "GB per rank at the peak", "fewest ranks that fit"):
        assert words in printed.out
    told = json.loads(file.read_text())
    group, recomputed = told["groups"]
    assert recomputed["ranks"][1]["activation_peak_bytes"] < group["ranks"][1]["activation_peak_bytes"]
    assert [row["ranks"] for row in group["ranks"]] == [1, 4]
    for row in group["ranks"]:
        assert sum(row["bytes"].values()) == row["peak_bytes"] >= row["peak_bytes_at_least"]
        assert row["activation_peak_bytes"] < row["peak_bytes"]
        assert row["seconds"]["total"] > 0
    assert sorted(path.name for path in folder.iterdir()) == ["bandwidth.png", "memory.png", "scaling.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_the_command_plans_what_is_kept(tmp_path, capsys):
    file = tmp_path / "plan.json"
    fixed = ["--ranks", "2", "--checkpoint", "without", "--compute", "bf16", "--json", str(file)]
    peaks = []
    for keep in ([], ["--keep", ""], ["--keep", "attention"], ["--keep", "attention, mlp"]):
        assert run(*fixed, *keep) == 0
        peaks.append(json.loads(file.read_text())["groups"][0]["ranks"][0]["peak_bytes"])
    assert "compute in bfloat16, keep=('attention', 'mlp'), reduce in float32" in capsys.readouterr().out
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3]


@pytest.mark.parametrize(("value", "argument"), [((), True), (("true",), True), (("0.5",), 0.5), (("200KB",), 200_000)])
def test_the_command_plans_offloaded_states(tmp_path, capsys, value, argument):
    file = tmp_path / "plan.json"
    fixed = ["--ranks", "2", "--checkpoint", "without", "--cluster", "dgx-a100", "--json", str(file)]
    peaks = []
    for offload in ([], ["--offload", *value]):
        assert run(*fixed, *offload) == 0
        row = json.loads(file.read_text())["groups"][0]["ranks"][0]
        peaks.append(row["peak_bytes"])
    assert row["host_bytes"] >= row["host_traffic"] > 0
    assert row["seconds"]["host"] == row["host_traffic"] / 25.1e9
    assert peaks[1] != peaks[0]
    before, after = capsys.readouterr().out.split("\nwrote")[:2]
    assert f"offload={argument}" in after
    assert "on host" in after
    assert "offload" not in before
    assert "on host" not in before


def test_the_picture_of_memory_has_the_numbers_of_the_table(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="--plots needs it")
    from matplotlib.figure import Figure

    drawn: dict[float, list[str]] = {}
    """The words of each line of the picture, by its distance from the bars."""

    def read(figure: Figure, *_: object, **__: object) -> None:
        for each in figure.axes[0].texts:
            if each.get_text().strip():
                drawn.setdefault(each.xyann[1], []).append(each.get_text())

    monkeypatch.setattr(Figure, "savefig", read)
    assert run("--ranks", "1", "4", "--stage", "3", "--checkpoint", "without", "--plots", str(tmp_path)) == 0
    table = [line.split()[:9] for line in capsys.readouterr().out.splitlines()]
    place = next(i for i, line in enumerate(table) if line[:1] == ["ranks"])
    assert sorted(drawn.values()) == sorted(map(list, zip(*table[place : place + 3], strict=True)))


def test_cards_are_names_or_amounts():
    assert memory_of("H100") == memory_of("80GB") == 80 * 10**9
    assert memory_of("1.5 GiB") == 3 * 2**29


def test_ranks_that_own_equally_much_share_a_line():
    whole = [(0, 6)] * 5
    members = [Owned(name=f"{i}", unit="", shape=(2, 3), ranges=whole, owner=i, place=i) for i in (0, 1, 3)]
    first, last = describe(members)
    assert first.startswith("ranks 0-1, 3, each: 1 parameters, 6 elements (33.3%; at most 0 of them")
    assert last.startswith("ranks 2, 4, each: 0 parameters")
