"""`fit`: the runs that a search finds are those of an exhaustive search, and a wrapped model keeps their promise."""

import ast
import inspect
from dataclasses import replace
from itertools import product
from textwrap import dedent

import pytest
import torch
from torch import nn

import shardlite
from shardlite import AdamW, LayoutError, Precision, ShardLite
from shardlite.cli import main
from shardlite.plan import CLUSTERS, Planner, Setting, Source, plain_events, search, simulate, timeline_of
from shardlite.plan.fit_text import _DEFAULTS, size
from shardlite.plan.fitting import DIMENSIONS, NAMES, RULES
from tests.support.models.residual import Chain

WIDTH, ROWS = 32, 4


class Block(nn.Sequential):
    """A linear layer whose result is saved for the backward."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def net() -> nn.Module:
    """Make a chain of blocks. A row has as many bytes of activations as a block has weights."""
    return Chain((Block() for _ in range(4)), end=torch.sum)


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.zeros(count, 8, WIDTH)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(Source("chain", net, lambda: (rows(),), "4 rows"))


# ---- the search -----------------------------------------------------------------------------------------------------


def strength(setting: Setting) -> int:
    return sum(2**i for i, rule in enumerate(RULES) if rule.applies(setting))


def everything(planner: Planner, start: Setting) -> list[tuple]:
    """Plan every combination. Return for each its choices, its cost, the limit that it needs, and the setting."""
    cluster = CLUSTERS["pcie-a100" if start.on_gpu else "cpu"]
    found = []
    for some in product(*(list(choose(start)) for choose in DIMENSIONS.values())):
        changes = {key: value for each in some for key, value in each.items()}
        for accumulate, sharded in ((1, False), (2, False), (2, True), (4, False), (4, True)):
            if accumulate > 1 and (changes["in_backward"] or (sharded and start.world_size == 1)):
                continue
            batch = {"rows": ROWS // accumulate, "accumulate": accumulate, "sharded": sharded}
            plan = planner.plan(replace(start, **changes, **batch))
            chain = timeline_of(plan.budget, list(plain_events(plan.budget))).total
            cost = (strength(plan.setting), round(simulate(plan, cluster).total, 6), plan.host_traffic, plan.peak)
            found.append((repr(some), cost, max(plan.peak, chain), plan.setting))
    return found


def cheapest(runs: list[tuple], nbytes: int) -> list[tuple]:
    """Return cost and setting of the three cheapest runs that fit, each with its largest micro-batch."""
    found: dict = {}
    for key, cost, need, setting in runs:
        if need <= nbytes:
            found.setdefault(key, []).append((cost, setting))
    for key, plans in found.items():
        largest = {
            way: max(each.rows for _, each in plans if each.sharded == way) for way in {s.sharded for _, s in plans}
        }
        plans = [each for each in plans if each[1].rows == largest[each[1].sharded]]
        found[key] = min(plans, key=lambda each: (each[1].rows < ROWS, each[0]))
    return sorted(found.values(), key=lambda each: each[0])[:3]


@pytest.mark.parametrize(("ranks", "on_gpu"), [(1, False), (2, False), (2, True)])
def test_the_runs_are_those_of_an_exhaustive_search(planner, ranks, on_gpu):
    """The limits are shares of the peak of the run to start from, so that no, few, many or all runs fit."""
    start = Setting(world_size=ranks, rows=ROWS, on_gpu=on_gpu)
    runs, most = everything(planner, start), planner.plan(start).peak
    for share in (0.2, 0.35, 0.45, 0.55, 0.7, 0.9, 1.1):
        expected = cheapest(runs, round(share * most))
        if not expected:
            least = min(need for _, _, need, _ in runs)
            with pytest.raises(LayoutError, match="nothing fits") as error:
                search(planner, start, round(share * most))
            assert f"holds {size(least)}" in str(error.value)
            continue
        fit = search(planner, start, round(share * most))
        for each, (cost, _) in zip((fit, *fit.alternatives), expected, strict=True):
            seconds, plan = round(each.step.total, 6), each.plan
            assert (strength(plan.setting), seconds, plan.host_traffic, plan.peak) == cost
        assert fit.plan.setting == expected[0][1]


def test_runs_that_change_numbers_come_last_and_are_named(planner):
    start = Setting(world_size=2, rows=ROWS)
    roomy = search(planner, start, planner.plan(start).peak)
    assert not any(each.rules for each in (roomy, *roomy.alternatives))
    compact = replace(start, precision=Precision(compute=torch.bfloat16, master="split24"), state="int8")
    least = min(planner.plan(replace(compact, in_backward=True, checkpoint=each)).peak for each in (False, True))
    tight = search(planner, start, least)
    assert "moments in int8" in tight.rules
    assert "moments in int8" in repr(tight)
    assert tight.adamw == {"state": "int8", "in_backward": True}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_does_not_change(planner, name):
    start = Setting(world_size=2, rows=2, accumulate=2, sharded=True)
    fields = {"stage": ("stage",), "precision": ("precision",), "moments": ("state",), "in_backward": ("in_backward",)}
    fields |= {"checkpointing": ("checkpoint",), "offload": ("offload",), "batch": ("rows", "accumulate")}
    nbytes = round(0.8 * planner.plan(start).peak)
    fit = search(planner, start, nbytes, keep=name)
    for each in (fit, *fit.alternatives):
        assert [getattr(each.plan.setting, field) for field in fields[name]] == [
            getattr(start, f) for f in fields[name]
        ]


def test_what_does_not_fit_is_named_with_what_is_smallest(planner):
    with pytest.raises(LayoutError, match=r"nothing fits in 20\.0 KB: on 2 ranks, the smallest run holds") as error:
        search(planner, Setting(world_size=2, rows=ROWS), 20_000)
    assert "most of it for " in str(error.value)
    assert "precision=Precision(compute=torch.bfloat16, master='split24'))" in str(error.value)
    with pytest.raises(LayoutError, match="below the full weights of the smallest unit"):
        search(planner, Setting(world_size=2, rows=ROWS), 2_000)


def test_weights_in_fp64_are_not_narrowed(group):
    """`ShardLite` refuses to gather them in bf16."""

    def double() -> nn.Module:
        return Chain((nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)), end=torch.sum)

    planner = Planner(Source("double", double, lambda: (rows().double(),), "4 rows"))
    with pytest.raises(LayoutError, match=r"keep=\['precision'\]"):
        search(planner, Setting(world_size=2, rows=ROWS), 20_000)
    with pytest.raises(LayoutError, match="would lose its precision"):
        ShardLite(double(), group=group, precision=Precision(compute=torch.bfloat16))


# ---- `shardlite.fit` ------------------------------------------------------------------------------------------------


def test_a_precision_per_module_is_kept_in_every_run():
    given = Precision(compute=torch.bfloat16, keep=("blocks.1",))
    fit = shardlite.fit(net, rows(), 10**6, ranks=2, precision=given, device="cuda")
    for each in (fit, *fit.alternatives):
        assert each.shardlite["precision"].keep == ("blocks.1",)
        assert "Precision(compute=torch.bfloat16, keep=('blocks.1',)" in "\n".join(each.lines)
    assert not fit.rules, "bf16 was asked for"
    without = shardlite.fit(net, rows(), 10**6, ranks=2, precision=replace(given, keep=None), device="cuda")
    assert fit.plan.peak > without.plan.peak


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "24XB"}, "memory '24XB' is neither an amount .80GB, 24GiB. nor one of A100-80GB"),
        ({"memory": 0}, "memory must be an amount .24GB, 24GiB. or a positive number of bytes, got 0"),
        ({"memory": 2.5}, "got 2.5"),
        ({"ranks": 0}, "ranks must be a number from 1 to 4096, got 0"),
        ({"global_batch": 7}, "global_batch must be a multiple of the 2 ranks, got 7"),
        ({"global_batch": 8.0}, "global_batch must be a multiple of the 2 ranks, got 8.0"),
        ({"keep": "formats"}, "keep takes names .* got 'formats'"),
        ({"cluster": "mine"}, "cluster 'mine' is not one of dgx-h100"),
        ({"example_batch": ()}, "has no rows"),
    ],
)
def test_arguments_are_checked(options, message):
    given = {"example_batch": rows(), "memory": "1GB", "ranks": 2, **options}
    with pytest.raises(ValueError, match=message):
        shardlite.fit(net, **given)


def test_random_numbers_and_the_batch_stay():
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return net()

    before, batch = torch.random.get_rng_state(), rows().fill_(3.0)
    shardlite.fit(seeded, batch, "1GB", ranks=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert batch.unique().tolist() == [3.0]


def run_lines(model: nn.Module, lines: list[str], batch: torch.Tensor, parts: int) -> tuple[ShardLite, AdamW]:
    """Run printed lines, and one step if they do not."""
    from contextlib import nullcontext

    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    from shardlite import MemoryLimit

    names = {"model": model, "torch": torch, "nullcontext": nullcontext, "Precision": Precision, "AdamW": AdamW}
    names |= {"ShardLite": ShardLite, "MemoryLimit": MemoryLimit}
    names["apply_activation_checkpointing"] = apply_activation_checkpointing
    pieces = batch.chunk(parts)
    names["loss_of"] = lambda part: names["model"](pieces[part])
    exec("\n".join(lines), names)
    if parts == 1:
        names["loss_of"](0).backward()
    names["optimizer"].step()
    return names["model"], names["optimizer"]


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_the_printed_lines_train_and_other_runs_break_the_promise(group, share):
    """What is printed is accepted. With another stage or another model, a rank would hold more than was promised."""
    start = shardlite.fit(net, rows(), "1GB", ranks=2, keep=NAMES, device="cpu")
    nbytes = round(share * start.plan.peak)
    fit = shardlite.fit(net, rows(), nbytes, ranks=2, device="cpu")
    ast.parse(dedent("\n".join(fit.lines)))
    for each in (fit, *fit.alternatives):
        model, _ = run_lines(net(), each.lines, rows(), each.accumulate)
        model.unwrap()
    tight = {**fit.shardlite, "memory_limit": replace(fit.memory_limit, nbytes=fit.plan.peak)}
    ShardLite(net(), group=group, **tight)
    with pytest.raises(LayoutError, match="memory_limit"):
        ShardLite(nn.Sequential(net(), net()), group=group, **tight)
    if fit.shardlite["stage"] > 0:
        with pytest.raises(LayoutError, match="memory_limit"):
            ShardLite(net(), group=group, **{**tight, "stage": 0})


def test_ranks_with_different_limits_all_learn_of_it(group):
    fit = shardlite.fit(net, rows(), 10**6 * (1 + group.rank()), ranks=2, device="cpu")
    module = net()
    before = [param.data_ptr() for param in module.parameters()]
    with pytest.raises(LayoutError, match="MemoryLimit"):
        ShardLite(module, group=group, **fit.shardlite)
    assert [param.data_ptr() for param in module.parameters()] == before


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    return main(["plan", "--model", "demo-tiny", "--batch", "4", *arguments])


def test_the_command_prints_runs_and_what_is_smallest(tmp_path, capsys):
    file = tmp_path / "fit.json"
    assert run("--ranks", "2", "--fit", "6MB", "--keep", "checkpointing", "--cluster", "cpu", "--json", str(file)) == 0
    said = capsys.readouterr().out
    assert "4 rows per rank and step, 6.00 MB per rank: the 3 cheapest runs that fit" in said
    assert "predicted, not measured" in said
    assert "apply_activation_checkpointing" not in said
    assert file.read_text().count('"micro_batch"') == 3
    assert run("--ranks", "2", "--fit", "1MB") == 1
    assert "nothing fits in 1.00 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--fit 1XB", "--fit '1XB' is neither an amount"),
        ("--fit 1GB --ranks 2 4", "--fit takes one number of ranks"),
        ("--fit 1GB --ranks 2 --card H100", "--card cannot be combined with --fit"),
        ("--fit 1GB --ranks 2 --global-batch 3", "--global-batch must be a multiple of --ranks 2, got 3"),
        ("--global-batch 4", "--global-batch requires --fit"),
        ("--fit 1GB --ranks 2 --keep moment", "these names forbid a change: stage, precision, moments"),
    ],
)
def test_wrong_options_of_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run(*arguments.split())
    assert message in capsys.readouterr().err


def test_arguments_that_are_not_printed_are_the_defaults():
    defaults = {}
    for function in (ShardLite.__init__, AdamW.__init__):
        defaults |= {name: each.default for name, each in inspect.signature(function).parameters.items()}
    assert {name: defaults[name] for name in _DEFAULTS} == _DEFAULTS
