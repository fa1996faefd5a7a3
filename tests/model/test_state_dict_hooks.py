"""Modules whose code changes their state dicts: by hooks and methods that rename, leave out or compute tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlite
from shardlite import LayoutError, ShardLite
from tests.support.twins.sharded import same_states


class Fused(nn.Module):
    """Two weights in one parameter. Files have the two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.offset) @ self.both.t()


class ByHook(Fused):
    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self.split)
        self._register_load_state_dict_pre_hook(self.fuse)

    @staticmethod
    def split(_: nn.Module, given: Any, prefix: str, __: Any) -> None:
        given[f"{prefix}first"], given[f"{prefix}second"] = given.pop(f"{prefix}both").chunk(2)

    def fuse(self, given: Any, prefix: str, *_: Any) -> None:
        given[f"{prefix}both"] = torch.cat([given.pop(f"{prefix}first"), given.pop(f"{prefix}second")])


class ByMethod(Fused):
    def _save_to_state_dict(self, given: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(given, prefix, keep_vars)
        given[f"{prefix}first"], given[f"{prefix}second"] = self.both[:4], self.both[4:]
        del given[f"{prefix}both"]

    def _load_from_state_dict(self, given: Any, prefix: str, *args: Any) -> None:
        given[f"{prefix}both"] = torch.cat([given.pop(f"{prefix}first"), given.pop(f"{prefix}second")])
        super()._load_from_state_dict(given, prefix, *args)


class ByValues(ByHook):
    """The hook needs values."""

    @staticmethod
    def split(module: nn.Module, given: Any, prefix: str, meta: Any) -> None:
        assert given[f"{prefix}both"].abs().max().item() > 0
        ByHook.split(module, given, prefix, meta)


KINDS = [ByHook, ByMethod, ByValues]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.stages(0, 2, 3)
def test_computed_entries_have_the_names_of_parameters(group: Any, tmp_path: Path, kind: Any, stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(kind(), nn.Linear(8, 3))
    files, values = {k: v.clone() for k, v in plain.state_dict().items()}, dict(plain.named_parameters())
    values = {name: value.detach().clone() for name, value in {**values, **dict(plain.named_buffers())}.items()}
    model = ShardLite(plain, group=group, stage=stage)
    assert {name for name, _ in model.full_parameters()} == values.keys() - {"0.offset"}
    same_states("full", model.full_state_dict(), values)
    with model.gathered(writeback=False):
        same_states("in gathered()", model.full_state_dict(), values)
        same_states("of the module", model.module.state_dict(), files)
    shardlite.save(tmp_path / "saved", model)
    other = {name: value + 1 for name, value in values.items()}
    model.load_full_state_dict(other)
    same_states("loaded", model.full_state_dict(), other)
    shardlite.load(tmp_path / "saved", model)
    same_states("saved", model.full_state_dict(), values)
    assert model.state_dict().keys() == values.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.stages(0, 3)
def test_files_of_the_module_are_loaded_inside_gathered(group: Any, kind: Any, stage: int) -> None:
    plain = nn.Sequential(kind())
    files = {name: value + 1 for name, value in plain.state_dict().items()}
    model = ShardLite(plain, group=group, stage=stage)
    with pytest.raises(LayoutError, match=r"`module\.load_state_dict` inside `gathered\(\)`"):
        model.load_full_state_dict(files)
    with model.gathered():
        model.module.load_state_dict(dict(files))
    with model.gathered(writeback=False):
        same_states("files", model.module.state_dict(), files)


class Renamed(nn.Linear):
    """Files have other names, copies on the CPU, and an entry that is no weight. They lack the bias."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_state_dict_hook(self.rename)

    @staticmethod
    def rename(_: nn.Module, given: Any, prefix: str, __: Any) -> None:
        given[f"{prefix}kernel"], given[f"{prefix}version"] = given.pop(f"{prefix}weight"), torch.tensor(2.0)
        del given[f"{prefix}bias"]


@pytest.mark.stages(0, 3)
def test_names_that_a_hook_gives_are_kept(group: Any, stage: int) -> None:
    model = ShardLite(nn.Sequential(Renamed()), group=group, stage=stage)
    assert model.full_state_dict().keys() == {"0.kernel", "0.version", "0.bias"}
    other = {name: value + 1 for name, value in model.full_state_dict().items()}
    model.load_full_state_dict(other)
    same_states("loaded", model.full_state_dict(), {**other, "0.version": torch.tensor(2.0)})
