"""Small runs of Lightning on the warm cluster, with DDP and with ShardLite in the same processes.

Lightning is imported inside functions, since that takes seconds.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.ranks.scripts import launched


@contextmanager
def session(group: dist.ProcessGroup, folder: Path, *, on_gpu: bool = False) -> Iterator[None]:
    """Be a process that torchrun has started, in which warnings of Lightning are no errors."""
    with launched(group, [str(folder / "run.py")], folder, "ignore", on_gpu=on_gpu), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch  # noqa: F401
        from lightning_utilities.core.rank_zero import rank_zero_only

        before = vars(rank_zero_only).get("rank")
        if on_gpu:
            dist.init_process_group("gloo")
        try:
            yield
        finally:
            rank_zero_only.rank = before


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Random rows with labels."""

    def __init__(self, count: int = 48, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 7, generator=random)
        self.y = torch.randint(5, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def loader(count: int = 48, seed: int = 0, batch: int = 4) -> DataLoader[Any]:
    """Return a loader, of which Lightning gives each rank a part."""
    return DataLoader(Rows(count, seed), batch)


def layers(width: int = 33) -> nn.Sequential:
    """Return a small network with a size that two and three ranks do not divide."""
    return nn.Sequential(nn.Linear(7, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 5))


def whole(trainer: Any) -> dict[str, Tensor]:
    """Return whole weights. Collective."""
    from shardlite import ShardLite

    model = trainer.strategy.model
    state = model.full_state_dict() if isinstance(model, ShardLite) else trainer.lightning_module.state_dict()
    return {name: value.to("cpu", copy=True) for name, value in state.items()}


UNUSED = "_find_unused_parameters_true"
TIMEOUT = timedelta(seconds=60)

Maker = Callable[..., Any]
"""Makes a `Trainer` from its keywords."""


def maker(folder: Path, ranks: int, strategy: Callable[[], Any] | str) -> Maker:
    """Return a function that makes trainers with one strategy."""
    from lightning.pytorch import Trainer

    def make(**options: Any) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "max_epochs": 2, "num_sanity_val_steps": 0}
        return Trainer(**{**quiet, **_hardware(ranks, strategy), "default_root_dir": folder, **options})

    return make


def fabric_maker(folder: Path, ranks: int, strategy: Callable[[], Any] | str) -> Maker:
    """Return a function that launches `Fabric` with one strategy."""
    from lightning.fabric import Fabric

    def make(**options: Any) -> Any:
        fabric = Fabric(**{**_hardware(ranks, strategy), **options})
        fabric.launch()
        return fabric

    return make


def _hardware(ranks: int, strategy: Callable[[], Any] | str) -> dict[str, Any]:
    chosen = strategy if isinstance(strategy, str) else strategy()
    if torch.cuda.is_available():
        return {"accelerator": "gpu", "devices": [0], "num_nodes": ranks, "strategy": chosen}
    return {"accelerator": "cpu", "devices": ranks, "strategy": chosen}


def on_both(
    group: dist.ProcessGroup,
    folder: Path,
    stage: int,
    case: Callable[[Maker], Any],
    *,
    fabric: bool = False,
    on_gpu: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Return the results of a case with DDP and with ShardLite, whose strategy gets the options."""
    with session(group, folder, on_gpu=on_gpu):
        from shardlite.integrations.lightning import ShardLiteFabricStrategy, ShardLiteStrategy

        of = fabric_maker if fabric else maker
        ours = ShardLiteFabricStrategy if fabric else ShardLiteStrategy
        results = []
        for name, strategy in (
            ("ddp", "ddp" + UNUSED),
            ("sharded", partial(ours, stage=stage, timeout=TIMEOUT, **options)),
        ):
            torch.manual_seed(5)
            own = folder / name
            own.mkdir(exist_ok=True)
            with chdir(own):
                results.append(case(of(own, group.size(), strategy)))
        return tuple(results)  # type: ignore[return-value]


def assert_same(plain: Any, sharded: Any, **bound: float) -> None:
    """Check that results are equal: tensors to the bit, or within a bound."""
    if isinstance(plain, Tensor):
        torch.testing.assert_close(sharded, plain, equal_nan=True, **({"rtol": 0, "atol": 0} | bound))
    elif isinstance(plain, dict):
        assert plain.keys() == sharded.keys(), (plain.keys(), sharded.keys())
        for key in plain:
            assert_same(plain[key], sharded[key], **bound)
    elif isinstance(plain, (list, tuple)):
        assert len(plain) == len(sharded), (plain, sharded)
        for each, other in zip(plain, sharded, strict=True):
            assert_same(each, other, **bound)
    else:
        assert plain == sharded, (plain, sharded)
