"""Compare our layouts with numbers of parameters, bytes and traffic published in papers and tutorials."""

from dataclasses import replace

import pytest
import torch

from shardlite.config import Precision
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.plan.presets import PRESETS
from shardlite.lab.plan.source import find_source
from shardlite.plan import Planner, Setting


@pytest.fixture(scope="module")
def gpt2() -> Planner:
    return Planner(find_source("gpt2", batch=1, context=8))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("turing-nlg", 17_177_000_000),
        ("gpt3-175b", 174_604_000_000),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(name, parameters):
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT(PRESETS[name]).parameters())
    assert numel == pytest.approx(parameters, rel=0 if parameters % 1_000_000 else 1e-4)


@pytest.mark.parametrize("ranks", [2, 8, 512, 4096])
def test_our_layouts_send_what_rings_do(gpt2, ranks):
    """Stage 0 all-reduces gradients; stage 3 gathers twice and reduces once, but for what the backward still has."""
    padded = gpt2.plan(Setting(stage=0, world_size=ranks)).budget.units
    nbytes = sum(flat.bucket for unit in padded for flat in unit.flats)
    assert nbytes == pytest.approx(4 * gpt2.numel, rel=2e-3 if ranks <= 512 else 0.02)
    plain = gpt2.plan(Setting(stage=0, world_size=ranks))
    assert plain.sent_by_gathers == 0
    assert plain.sent_by_reductions == pytest.approx(2 * (ranks - 1) / ranks * nbytes, rel=1e-9)
    full = gpt2.plan(Setting(stage=3, world_size=ranks))
    still_there = sum(unit.sent for unit in full.budget.units if unit.is_root) + 2 * full.budget.units[-1].sent
    sent = full.sent_by_gathers + full.sent_by_reductions
    assert sent + still_there == pytest.approx(3 * (ranks - 1) / ranks * nbytes, rel=1e-9)


def test_states_are_16_bytes_per_parameter_or_fewer_where_formats_say_so(gpt2):
    """Parameters, optimizer state and gradients per parameter; see docs/precision.md."""
    compact = Precision(compute=torch.bfloat16, master="split24")
    for setting, per_parameter in (
        (Setting(world_size=8), 16),
        (Setting(world_size=8, in_backward=True), 12),
        (Setting(world_size=8, in_backward=True, precision=compact, state="int8"), 3 + 2 + 2 / 32 + 2 / 32),
    ):
        plan = gpt2.plan(replace(setting, on_gpu=False))
        held = plan.budget.held["parameters"] + plan.budget.held["optimizer state"]
        gradients = sum(flat.mean for unit in plan.budget.units for flat in unit.flats)
        assert (held + gradients) * 8 / gpt2.numel == pytest.approx(per_parameter, rel=1e-3)
