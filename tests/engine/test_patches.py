"""ShardLite patches PyTorch only from the first wrapping on, and only as its page of patches lists."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types, _global_optimizer_pre_hooks

from shardlite import ShardLite
from shardlite.engine.patches import install_patches
from shardlite.patches import PATCHES, AfterImport
from tests.support.markdown import ROOT, cells
from tests.support.ranks.scripts import run_process


def test_the_page_lists_all_patches():
    listed = cells((ROOT / "docs" / "patches.md").read_text().split("## Transformers")[0])
    assert listed == [[each.target, each.why, each.rests_on] for each in PATCHES if each.package == "torch"]


WATCHED = """
import sys, torch, torch.distributed.checkpoint.state_dict as states
from torch.amp import GradScaler
from torch.nn.utils import clip_grad, get_total_norm
from torch.optim import Optimizer, optimizer

def now():
    cells = [each.__closure__[0].cell_contents for each in (get_total_norm, clip_grad._clip_grads_with_norm_)]
    hooks = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
    kinds = list(optimizer._foreach_supported_types)
    found = [vars(each).copy() for each in (Optimizer, GradScaler, torch.nn.Module, clip_grad, states)]
    return cells, hooks, kinds, found, list(sys.meta_path)

before = now()
"""


@pytest.mark.parametrize("program", ["import shardlite", "from shardlite import ShardLite, AdamW, EMA, Precision"])
def test_importing_the_library_patches_nothing(program):
    done = run_process("-c", f"{WATCHED}{program}\nassert now() == before")
    assert done.status == 0, done.err


def test_patches_are_applied_once():
    install_patches()
    hooks, kinds = len(_global_optimizer_pre_hooks), len(_foreach_supported_types)
    replaced = Optimizer.state_dict, nn.Module._apply, get_total_norm.__closure__[0].cell_contents
    install_patches()
    assert (len(_global_optimizer_pre_hooks), len(_foreach_supported_types)) == (hooks, kinds)
    assert replaced == (Optimizer.state_dict, nn.Module._apply, get_total_norm.__closure__[0].cell_contents)


def test_functions_that_were_imported_by_name_know_shards(group: Any) -> None:
    """This file has imported PyTorch's functions by name, as a program does before it wraps a model."""
    model = ShardLite(nn.Linear(8, 8), group=group)
    model(torch.ones(2, 8) * (1 + dist.get_rank(group))).square().mean().backward()
    grads = [shard.grad for shard in model.parameters()]
    norm = get_total_norm(grads)
    with model.gathered():
        assert norm == model.clip_grad_norm_(float("inf"))
    assert clip_grad_norm_(model.parameters(), 2 * float(norm)) == norm
    clip_grads_with_norm_(model.parameters(), float(norm) / 2, norm)
    torch.testing.assert_close(get_total_norm([shard.grad for shard in model.parameters()]), norm / 2)
    norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size(group))]
    dist.all_gather(norms, norm, group=group)
    assert all(each == norm for each in norms)
    clip_grads_with_norm_(model.module.parameters(), 1.0, norm)  # as a program has them that read them before wrapping
    torch.testing.assert_close(get_total_norm([shard.grad for shard in model.parameters()]), torch.tensor(0.5))


WRAPPED = "from shardlite import ShardLite; from shardlite.engine.patches import install_patches; install_patches()"
TAUGHT = """
from torch.distributed.checkpoint import state_dict
print(*{f.__code__.co_filename for f in vars(state_dict).values() if hasattr(f, "__code__")})
"""


@pytest.mark.parametrize(
    "program",
    [
        f"import torch.distributed.checkpoint.state_dict; {WRAPPED}",
        f"{WRAPPED}; import torch.distributed.checkpoint.state_dict",
        f"{WRAPPED}; from shardlite import save",
    ],
)
def test_functions_for_state_dicts_know_wrapped_models_whenever_they_are_imported(program):
    done = run_process("-c", program + TAUGHT)
    assert done.status == 0, done.err
    assert "shardlite/patches.py" in done.out


def test_an_import_that_fails_is_followed_when_it_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    module, calls = tmp_path / "late_module.py", []
    finder = AfterImport("late_module", lambda: calls.append(sys.modules["late_module"].VALUE))
    sys.meta_path.insert(0, finder)
    module.write_text("VALUE = 1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_module("late_module")
    assert calls == []
    module.write_text("VALUE = 7  # now")
    import_module("late_module")
    assert calls == [7]
    assert finder not in sys.meta_path
