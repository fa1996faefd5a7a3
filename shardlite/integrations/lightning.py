"""Train with Lightning: `Trainer(strategy="shardlite")` and `Fabric(strategy="shardlite")` shard the model.

    import shardlite.integrations.lightning  # registers the strategies

    trainer = Trainer(strategy="shardlite", ...)             # stage 3; also "shardlite_stage_0" to "shardlite_stage_3"
    trainer = Trainer(strategy=ShardLiteStrategy(stage=2, prefetch=2), ...)

The strategies start ranks as `DDPStrategy` does. A checkpoint is a file as Lightning writes it without sharding: it has
full weights and full optimizer states.

Tried with lightning 2.6.6.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite import ShardLite, full_optimizer_state
from shardlite.extend import install, models_of, patch
from shardlite.integrations._wrapping import (
    Original,
    adopt,
    check_options,
    gather_in,
    load_full_state,
    model_of,
    params_of,
    required,
    shards_of,
)

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    raise ImportError(
        "shardlite.integrations.lightning: pytorch_lightning is already imported, and its classes differ from "
        "lightning's: write `from lightning.pytorch import Trainer, LightningModule`"
    )
_PACKAGES = "lightning >= 2.6 (pytorch_lightning and lightning_fabric are other packages, which it does not work with)"
with required(__name__, _PACKAGES, "lightning"):
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.grads import grad_norm

__all__ = ["ShardLiteFabricStrategy", "ShardLiteStrategy"]


class _Kept:
    """Attribute of a `LightningModule` that keeps its wrapped model alive between trainers. Copies have no model."""

    def __init__(self, model: ShardLite | None = None, settings: object = None) -> None:
        self.model, self.settings = model, settings

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Kept, ()


def _wrapped(module: nn.Module) -> ShardLite | None:
    """Return the wrapped model that the parameters of a module belong to."""
    return next(iter(models_of(module.parameters())), None)


# ---- Trainer --------------------------------------------------------------------------------------------------------


class ShardLiteStrategy(DDPStrategy):  # type: ignore[misc]
    """Strategy of Lightning's `Trainer` that shards an unchanged `LightningModule`.

    `trainer.strategy.model` is the `ShardLite` model. The module stays sharded when `fit` and other methods of the
    trainer return; `trainer.strategy.model.unwrap()` makes it a plain module again. A module may be passed to another
    `Trainer`: with the same options the wrapped model is used again, otherwise it is unwrapped and wrapped anew.

    Args:
        stage: ZeRO stage, as for `ShardLite`.
        options: other keywords of `ShardLite`, except `device`, and the keywords `accelerator`, `parallel_devices`,
            `cluster_environment`, `checkpoint_io`, `precision_plugin`, `process_group_backend` and `start_method` of
            `DDPStrategy`. `timeout` is also that of the process group.

    Raises:
        TypeError: an option is unknown.
        ValueError: `stage` is not 0, 1, 2 or 3.

    Example:
        >>> trainer = Trainer(strategy=ShardLiteStrategy(stage=3), devices=2)
    """

    def __init__(self, stage: int = 3, **options: Any) -> None:
        own, self._options = _split_options(type(self).__name__, stage, options)
        super().__init__(**own)

    # ---- setup ------------------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Attach a module."""
        super().connect(model)
        self._was_on_meta = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded into the sharded model, because the module had no memory for them."""
        return self._was_on_meta or any(param.is_meta for param in self.lightning_module.parameters())

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module, unless it is wrapped already. Then let it create its optimizers, and give them shards."""
        if next(self.lightning_module.parameters(), None) is None:
            super().setup(trainer)  # there is nothing to shard
            return
        self.accelerator.setup(trainer)
        _refuse_precision(self.precision_plugin)
        self._was_on_meta = self.restore_checkpoint_after_setup
        self.model = self._wrapped_model(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                adopt(self.model, optimizer)
        _gather_for_averages(trainer, self.model)
        self.setup_precision_plugin()

    def _wrapped_model(self, trainer: Trainer) -> ShardLite:
        module, settings = self.lightning_module, (self._options, self.precision_plugin.precision)
        kept, known = getattr(module, "_shardlite_kept", None), _wrapped(module)
        if known is not None and kept is not None and kept.model is known:
            if kept.settings == settings:
                return known
            known.unwrap()
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        wrapped = _wrap(module, self.root_device, self._options)
        module._shardlite_kept = _Kept(wrapped, settings)
        return wrapped

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Return a context that accumulates gradients. The Trainer enters it for all batches of a step but the last."""
        return self.model.no_sync()

    def teardown(self) -> None:
        """Release all resources but the model, because a sharded model cannot be moved to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full weights on rank 0, which writes the checkpoint. Collective."""
        if not isinstance(self.model, ShardLite):
            return super().lightning_module_state_dict()
        if not any(map(_chooses_state, self.lightning_module.modules())):
            return self.model.full_state_dict(rank=0)
        with self.model.gathered(writeback=False):
            state = self.lightning_module.state_dict()
            return {name: _on_cpu(value) for name, value in state.items()} if self.is_global_zero else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full weights: those of rank 0, if the module is sharded."""
        wrapped = _wrapped(self.lightning_module)
        if wrapped is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            wrapped.load_full_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer on rank 0. Collective."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return _full_state(plain, super().optimizer_state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load full optimizer states, of any number of ranks and of any strategy. Collective."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_full_state(optimizer, state)


# ---- Fabric ---------------------------------------------------------------------------------------------------------


class ShardLiteFabricStrategy(FabricDDPStrategy):  # type: ignore[misc]
    """Strategy of Lightning's `Fabric` that shards models.

    `fabric.setup(model, optimizer)`, and `fabric.setup_module(model)` followed by `fabric.setup_optimizers(optimizer)`,
    wrap the model and give shards to the optimizer. The optimizer may be built before or after.

    Args:
        stage: ZeRO stage, as for `ShardLite`.
        options: as for `ShardLiteStrategy`. `precision` is that of `ShardLite`; Lightning's is `Fabric(precision=...)`.

    Raises:
        TypeError: an option is unknown.
        ValueError: `stage` is not 0, 1, 2 or 3.

    Example:
        >>> fabric = Fabric(strategy=ShardLiteFabricStrategy(stage=3), devices=2)
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(model, optimizer)
    """

    def __init__(self, stage: int = 3, **options: Any) -> None:
        own, self._options = _split_options(type(self).__name__, stage, options)
        if "precision_plugin" in own:
            own["precision"] = own.pop("precision_plugin")
        super().__init__(**own)
        self._backward_sync_control = _NoSync()

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module, unless it has no memory yet."""
        if not any(param.is_meta for param in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> ShardLite:
        """Wrap a module."""
        _refuse_precision(self.precision)
        return _wrap(module, self.root_device, self._options)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give shards to an optimizer."""
        for model in models_of(params_of(optimizer)):
            adopt(model, optimizer)
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full weights on rank 0. Collective."""
        if isinstance(module, ShardLite):
            return module.full_state_dict(rank=0)
        return super().get_module_state_dict(module)  # type: ignore[no-any-return]

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load rank 0's full weights. Collective."""
        if isinstance(module, ShardLite):
            module.load_full_state_dict(state_dict, strict)
        else:
            super().load_module_state_dict(module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer on rank 0. Collective."""
        return _full_state(optimizer, super().get_optimizer_state)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        """Load a file into the objects of `state`. Optimizers load full states. Collective."""
        if isinstance(state, Optimizer):
            load_full_state(state, self.checkpoint_io.load_checkpoint(path, **options))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, **options)  # type: ignore[no-any-return]
        inner = {key: _FullState(each) if isinstance(each, Optimizer) else each for key, each in state.items()}
        rest = super().load_checkpoint(path, inner, strict, **options)
        state.update({key: each for key, each in inner.items() if not isinstance(each, _FullState)})
        return rest  # type: ignore[no-any-return]


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    """Lets `fabric.no_backward_sync` accumulate gradients."""

    def no_backward_sync(self, module: ShardLite, enabled: bool) -> AbstractContextManager[None]:
        """Return `no_sync()` of the model if `enabled`."""
        return module.no_sync() if enabled else nullcontext()


# ---- both -----------------------------------------------------------------------------------------------------------


class _FullState:
    """An optimizer whose state is whole when it is saved and loaded."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the full state on rank 0. Collective."""
        return _full_state(self._optimizer, type(self._optimizer).state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a full state. Collective."""
        load_full_state(self._optimizer, state)


def _full_state(optimizer: Optimizer, plain: Callable[[Optimizer], dict[str, Any]]) -> dict[str, Any]:
    model = model_of(optimizer)
    return plain(optimizer) if model is None else full_optimizer_state(model, optimizer, rank=0)


_OWN = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "start_method"),
}


def _split_options(name: str, stage: int, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords of `DDPStrategy`, and those of `ShardLite`."""
    check_options(name, {"stage": stage, **options}, _OWN)
    own = {key: value for key, value in options.items() if key in _OWN or key == "timeout"}
    return own, {"stage": stage, **{key: value for key, value in options.items() if key not in _OWN}}


def _refuse_precision(plugin: Any) -> None:
    """Raise `ValueError` for plugins that replace the layers of a module."""
    name = type(plugin).__name__
    if name in ("BitsandbytesPrecision", "TransformerEnginePrecision"):
        raise ValueError(
            f"{name} replaces layers, which was not tried with ShardLite: use precision='bf16-mixed', '16-mixed', "
            "'bf16-true' or '32-true', or ShardLiteStrategy(precision=shardlite.Precision(...))"
        )


def _wrap(module: nn.Module, device: torch.device, options: Mapping[str, Any]) -> ShardLite:
    install("lightning")
    if not any(param.is_meta for param in module.parameters()):
        module.to(device)
    return ShardLite(module, device=device, **options)


def _chooses_state(module: nn.Module) -> bool:
    """Return whether a module changes its state dict, by methods or hooks."""
    names = ("state_dict", "_save_to_state_dict", "get_extra_state")
    overrides = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)
    return overrides or bool(module._state_dict_hooks)


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# ---- callbacks and functions that read weights ----------------------------------------------------------------------


def _gather_for_averages(trainer: Trainer, model: ShardLite) -> None:
    """Gather full weights for callbacks that average them."""
    known = partial(_wrapped, model.module)
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            gather_in(callback, "update_parameters", known)
            gather_in(callback, "transfer_weights", known, writeback=True)
        if isinstance(callback, WeightAveraging):
            for name in ("_swap_models", "_copy_average_to_current", "on_load_checkpoint"):
                gather_in(callback, name, known, writeback=True)
            if callback._average_model is not None:
                gather_in(callback._average_model, "update_parameters", known)


@patch(LightningModule, "toggle_optimizer", package="lightning")
def _toggle_optimizer(original: Original, module: LightningModule, optimizer: Optimizer) -> None:
    """Shards of other optimizers would be frozen, which has no effect on gradients."""
    if _wrapped(module) is None:
        original(module, optimizer)
        return
    state = {param: param.requires_grad for each in module.trainer.optimizers for param in _own_params(each)}
    own = set(_own_params(optimizer))
    for param, before in state.items():
        param.requires_grad = before and param in own
    module._param_requires_grad_state = state


@patch(LightningModule, "untoggle_optimizer", package="lightning")
def _untoggle_optimizer(original: Original, module: LightningModule, optimizer: Optimizer) -> None:
    """Parameters that `toggle_optimizer` has frozen would stay frozen."""
    if _wrapped(module) is None:
        original(module, optimizer)
        return
    for param in module._param_requires_grad_state.keys() - set(_own_params(optimizer)):
        param.requires_grad = module._param_requires_grad_state[param]
    module._param_requires_grad_state = {}


def _own_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters whose shards an optimizer holds."""
    held = params_of(optimizer)
    param_of = {shard: param for param, shard in shards_of(held).items()}
    return [param_of.get(each, each) for each in held]


@patch(BaseFinetuning, "filter_on_optimizer", package="lightning")
def _filter_on_optimizer(original: Original, optimizer: Optimizer, params: Iterable[Tensor]) -> Any:
    """Optimizers would get parameters instead of shards, and those that they hold already would be added again."""
    params = list(params)
    shards = shards_of(params)
    if not shards:
        return original(optimizer, params)
    held = set(params_of(optimizer))
    return [shard for param in params if (shard := shards.get(param, param)) not in held]


@patch(BaseFinetuning, "_apply_mapping_to_param_groups", package="lightning")
def _apply_mapping(original: Original, groups: list[dict[str, Any]], mapping: Mapping[Any, Any]) -> Any:
    """The groups of an optimizer would be restored with parameters instead of shards."""
    found = [each for each in (*mapping, *mapping.values()) if isinstance(each, Tensor)]
    shards = shards_of(found)
    params = {shard: param for param, shard in shards.items()}
    groups = [{**group, "params": [params.get(each, each) for each in group["params"]]} for group in groups]
    result = original(groups, mapping)
    return [{**group, "params": [shards.get(each, each) for each in group["params"]]} for group in result]


@patch(grad_norm, package="lightning")
def _full_grad_norm(original: Original, module: nn.Module, norm_type: float | str, group_separator: str = "/") -> Any:
    """Each rank would log norms of its parts."""
    model = _wrapped(module)
    if model is None:
        return original(module, norm_type, group_separator)
    names = {param: name for name, param in model.module.named_parameters()}
    own = ((name, param) for name, param in module.named_parameters() if param.requires_grad)
    grads = {name: model.full_grad(names[param]) for name, param in own}
    return original(_Gradients(grads), norm_type, group_separator)


class _Gradients(nn.Module):
    """A stand-in for a module, for functions that read gradients only."""

    def __init__(self, grads: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self._grads = grads

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, Any]]:
        """Yield names, and objects with a gradient."""
        for name, grad in self._grads.items():
            yield name, SimpleNamespace(grad=grad)


for _registry, _strategy in ((StrategyRegistry, ShardLiteStrategy), (STRATEGY_REGISTRY, ShardLiteFabricStrategy)):
    _registry.register("shardlite", _strategy, "ShardLite, stage 3", override=True)
    for _stage in range(4):
        _registry.register(f"shardlite_stage_{_stage}", _strategy, "ShardLite", override=True, stage=_stage)
