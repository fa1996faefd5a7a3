"""The optimizers of other libraries: their classes, and options with which they can be built.

`torch` is PyTorch. `timm` and `pytorch_optimizer` are optional: `pip install --no-deps timm pytorch_optimizer`. If
torchvision is missing, which the rest of timm requires, only the optimizers of timm are imported.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

LR = 0.01

_ATTEMPTS: tuple[dict[str, Any], ...] = ({"lr": LR}, {}, {"num_iterations": 100, "lr": LR}, {"num_iterations": 100})
"""Options to build a class with. The first that the constructor takes are used."""


class Candidate(NamedTuple):
    """An optimizer of a library."""

    library: str
    name: str
    kind: type[Optimizer]
    options: dict[str, Any]
    grouped: bool = False
    """Whether the class must be told which parameters are matrices, by an entry `use_muon` of each group."""

    def groups(self, params: list[Tensor]) -> Any:
        """Return parameters in the form that the class expects."""
        if self.kind is Muon:
            return [param for param in params if param.ndim == 2]
        if not self.grouped:
            return params
        return [
            {"params": [param for param in params if (param.ndim == 2) is matrices], "use_muon": matrices}
            for matrices in (True, False)
        ]


def candidates(library: str) -> Iterator[Candidate]:
    """Yield the optimizers that a library names, except those that need another package or a GPU."""
    for name, kind, options in _LIBRARIES[library]():
        attempts = _ATTEMPTS if options is None else ({"lr": LR, **options}, options, {"momentum": 0.9, **options})
        found = [Candidate(library, name, kind, each, grouped) for grouped in (False, True) for each in attempts]
        yield next(filter(_can_build, found), found[0])


def installed(library: str) -> bool:
    """Return whether a library is installed."""
    return find_spec(library) is not None


def _can_build(candidate: Candidate) -> bool:
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((8, 8), (8,))]
    try:
        candidate.kind(candidate.groups(params), **candidate.options)  # type: ignore[arg-type]
    except Exception:  # the constructor of a foreign class may raise anything
        return False
    return True


def _of_torch() -> Iterator[tuple[str, type[Optimizer], None]]:
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            yield name, kind, None


def _of_timm() -> Iterator[tuple[str, type[Optimizer], dict[str, Any]]]:
    optim = _timm_optim()
    for name in optim.list_optimizers(exclude_filters=["bnb*", "fused*", "apex*"]):
        info = optim.get_optimizer_info(name)
        yield name, info.opt_class, dict(info.defaults or {})


def _timm_optim() -> Any:
    try:
        return import_module("timm.optim")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
    spec: Any = find_spec("timm")
    for name in [each for each in sys.modules if each.partition(".")[0] == "timm"]:
        del sys.modules[name]
    for name in ("timm", "timm.models"):
        module: Any = ModuleType(name)
        module.__path__ = [str(Path(spec.origin).parents[1].joinpath(*name.split(".")))]
        sys.modules[name] = module
    sys.modules["timm.models"].group_parameters = None  # type: ignore[attr-defined]  # not used without a model
    return import_module("timm.optim")


def _of_pytorch_optimizer() -> Iterator[tuple[str, type[Optimizer], None]]:
    library: Any = import_module("pytorch_optimizer")
    for name in library.get_supported_optimizers():
        try:
            yield name, library.load_optimizer(name), None
        except ImportError:
            continue  # an interface to a package that is not installed


_LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, type[Optimizer], dict[str, Any] | None]]]] = {
    "torch": _of_torch,
    "timm": _of_timm,
    "pytorch_optimizer": _of_pytorch_optimizer,
}
LIBRARIES = tuple(_LIBRARIES)
