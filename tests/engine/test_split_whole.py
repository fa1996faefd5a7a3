"""Full weights of a model with split weights: state dicts, `gathered()`, averages, and other kinds of parameters.

Legend: `W` ranks.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import EMA, AdamW, PhaseError, ShardLite
from tests.support.internals import flats
from tests.support.models.losses import on_rows, on_tokens
from tests.support.models.small import MLP, LanguageModel
from tests.support.twins.sharded import Turn, _seeded, same_bits, same_states, some_stages, take_step
from tests.support.twins.split import SPLIT, cut, parts, trained

# ---- whole weights --------------------------------------------------------------------------------------------------


def saves(group: Any, stage: int) -> dict[str, Tensor]:
    return trained(group, stage=stage)[0].full_state_dict()


def loads(group: Any, stage: int, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Body of a rank: what was saved comes back to the bit; what has more digits is rounded to 24 bits."""
    model = ShardLite(LanguageModel(), group=group, stage=stage, precision=SPLIT)
    model(torch.zeros(1, 2, dtype=torch.int64))  # full weights that are old soon
    model.load_full_state_dict(saved)
    same_states("state", model.full_state_dict(), saved)
    generator = torch.Generator().manual_seed(3)
    precise = {name: torch.randn(value.shape, generator=generator) for name, value in saved.items()}
    precise["head.weight"] = precise["embed.weight"]
    model.load_full_state_dict(precise)
    same_states("rounded", model.full_state_dict(), {name: cut(value) for name, value in precise.items()})
    with torch.no_grad(), model.gathered(writeback=False):
        for name, param in model.module.named_parameters():
            same_bits(f"{name}, gathered", param.detach(), parts(precise[name])[0])
    return saved


@pytest.mark.stages(0, 3)
def test_state_dicts_have_all_24_bits_at_any_world_size(cluster, stage):
    saved, *others = cluster.run(saves, 2, stage)
    for other in others:
        same_states("state", other, saved)
    for value in saved.values():
        same_bits("24 bits", value, cut(value))
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    for world_size in (1, 2, 3):
        cluster.run(loads, world_size, 3 - stage, saved)


@pytest.mark.stages(0, 3)
@pytest.mark.ranks(1, 3)
def test_writing_into_gathered_weights(group: Any, stage: int) -> None:
    """What was written counts exactly, all else keeps its digits; an exception undoes it."""
    model, optimizer = trained(group, stage=stage)
    expected = model.full_state_dict()
    names = [name for name, _ in model.module.named_parameters()]
    with model.gathered():
        pass
    same_states("only read", model.full_state_dict(), expected)
    with pytest.raises(KeyError), model.gathered(), torch.no_grad():
        _spoil(model.module)
    same_states("undone", model.full_state_dict(), expected)
    with model.gathered(*names[2:6]), torch.no_grad():
        for name in names[2:6]:
            model.module.get_parameter(name).view(-1)[1::3] = 7.1
            expected[name].view(-1)[1::3] = torch.tensor(7.1).bfloat16().float()
    same_states("written", model.full_state_dict(), expected)
    with model.gathered(writeback=False), torch.no_grad():
        for name, param in model.module.named_parameters():
            same_bits(f"{name}, gathered", param.detach(), parts(expected[name])[0])
    on_tokens(model, Turn(9, 0, 0)).backward()
    optimizer.step()


def _spoil(module: nn.Module) -> None:
    for param in module.parameters():
        param.fill_(7)
    raise KeyError


@pytest.mark.stages(0, 3)
def test_moving_averages(group: Any, stage: int) -> None:
    """Averages are in fp32; what an exchange loses of them is half a unit of the 24th bit at most."""
    model, optimizer = trained(group, stage=stage)
    ema = EMA(model, 0.75)
    expected = {name: value.clone() for name, value in model.full_state_dict().items()}
    for step in range(3):
        take_step(optimizer, on_tokens(model, Turn(step, torch.distributed.get_rank(), 0)))
        ema.update()
        for name, value in model.full_state_dict().items():
            expected[name].lerp_(value, 0.25)
    own = model.full_state_dict()
    for name, value in _named_averages(model, ema):
        same_bits(f"average of {name}", value, _own_part(model, name, expected[name]))
    averaged = ema.full_state_dict()
    for name, value in averaged.items():
        same_bits(f"{name}, cut", value, cut(expected[name]))
        assert ((value - expected[name]).abs() <= expected[name].abs() * 2**-16).all()
    for name, value in _named_averages(model, ema):
        same_bits(f"average of {name}, exchanged", value, _own_part(model, name, averaged[name]))
    with ema.swapped():
        same_states("swapped", model.full_state_dict(), averaged)
        with pytest.raises(PhaseError):
            optimizer.step()
    with pytest.raises(KeyError), ema.swapped():
        raise KeyError
    same_states("back", model.full_state_dict(), own)
    saved = ema.state_dict()
    other = EMA(model, 0.75)
    other.load_state_dict(saved)
    same_states("loaded", other.full_state_dict(), averaged)


def _named_averages(model: ShardLite, ema: EMA) -> Iterator[tuple[str, Tensor]]:
    for name, value in ema.state_dict()["averages"].items():
        assert value.dtype == torch.float32
        yield name, value


def _own_part(model: ShardLite, name: str, whole: Tensor) -> Tensor:
    return next(f.part_of(i, whole) for f in flats(model) for i, slot in enumerate(f.layout.slots) if slot.name == name)


# ---- kinds of parameters --------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Parameters of many dtypes, frozen and not. [B, 7] -> [B, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Parameter(torch.randn(7, 7) / 3)
        self.narrow = nn.Parameter(torch.randn(7, 7).half() / 3)
        self.brain = nn.Parameter(torch.randn(7, 7).bfloat16() / 3)
        self.fixed = nn.Parameter(torch.randn(7, 7) / 3, requires_grad=False)
        self.fixed_brain = nn.Parameter(torch.randn(7, 7).bfloat16() / 3, requires_grad=False)
        self.codes = nn.Parameter(torch.arange(7), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.full, self.narrow, self.brain, self.fixed, self.fixed_brain):
            assert weight.dtype == torch.bfloat16
            x = torch.tanh(x @ weight * self.one)
        return x[:, self.codes] + self.nothing.sum()


@pytest.mark.stages(2, 3)
@pytest.mark.ranks(1, 2)
def test_parameters_of_all_dtypes_in_one_model(group: Any, stage: int) -> None:
    """Those are split that are trained; the others are kept as they were."""
    module = _seeded(lambda: nn.Sequential(Kinds(), Kinds()))
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    model = ShardLite(module, group=group, stage=stage, units=Kinds, precision=SPLIT)
    optimizer = AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    full = model.full_state_dict()
    for name, value in before.items():
        expected = cut(value.float()) if value.dtype.is_floating_point and "fixed" not in name else value
        same_bits(name, full[name], expected)
    assert model.get_parameter("0.fixed").dtype == torch.bfloat16  # as it is used
    for _ in range(2):
        take_step(optimizer, on_rows(model, Turn(0, 0, 0)))
    after = model.full_state_dict()
    for name, value in after.items():
        trained_ = "fixed" not in name and "codes" not in name and value.numel() > 0
        assert torch.equal(value, full[name]) != trained_, name
    module.requires_grad_(False)
    module[0].fixed.requires_grad_(True)  # a frozen one in fp32 is not split, and may be trained later
    unfrozen = AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    on_rows(model, Turn(1, 0, 0)).backward()
    unfrozen.step()
    changed = {name for name, value in model.full_state_dict().items() if not torch.equal(value, after[name])}
    assert changed == {"0.fixed"}


def test_meta_device(group: Any) -> None:
    """The same weights are born on the meta device."""
    for stage in some_stages(2, 3):
        torch.manual_seed(5)
        born = ShardLite(MLP([7, 33, 5]), group=group, stage=stage, precision=SPLIT).full_state_dict()
        with torch.device("meta"):
            module = MLP([7, 33, 5])
        torch.manual_seed(5)
        model = ShardLite(module, group=group, stage=stage, precision=SPLIT, device="cpu")
        same_states("state", model.full_state_dict(), born)
