"""Train with Lightning: `Trainer(strategy="shardlite")` and `Fabric(strategy="shardlite")` shard the model.

    import shardlite.integrations.lightning  # registers the strategies

    trainer = Trainer(strategy="shardlite", ...)             # stage 3; also "shardlite_stage_0" to "shardlite_stage_3"
    trainer = Trainer(strategy=ShardLiteStrategy(stage=2, prefetch=2), ...)

The strategies start ranks as `DDPStrategy` does. A checkpoint is a file as Lightning writes it without sharding: it has
whole weights and whole optimizer states.

Tried with lightning 2.6.6.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardlite
from shardlite.model import ShardLite

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    raise ImportError(
        "shardlite.integrations.lightning works with the package lightning, and this program has imported "
        "pytorch_lightning, whose classes are others: write `from lightning.pytorch import Trainer, LightningModule`"
    )
try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.grads import grad_norm as _grad_norm
except ImportError as error:
    raise ImportError(
        "shardlite.integrations.lightning requires lightning >= 2.6: pip install 'shardlite[lightning]' "
        "(pytorch_lightning and lightning_fabric are other packages, which it does not work with)"
    ) from error

__all__ = ["ShardLiteFabricStrategy", "ShardLiteStrategy"]

_WRAPPED = "_shardlite_wrapped"
"""Attribute of a `LightningModule`: the wrapped model, and the options with which it was wrapped."""

_models: "WeakSet[ShardLite]" = WeakSet()
"""All models that strategies have wrapped."""


# ---- Trainer --------------------------------------------------------------------------------------------------------


class ShardLiteStrategy(DDPStrategy):
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
        own, self._options = _split_options(type(self).__name__, DDPStrategy, stage, options)
        super().__init__(**own)

    # ---- setup ------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded into the sharded model, because the module has no memory for them."""
        return any(param.is_meta for param in self.lightning_module.parameters())

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module, unless it is wrapped already. Then let it create its optimizers, and give them shards."""
        self.accelerator.setup(trainer)
        _refuse_precision(self.precision_plugin)
        self.model = self._wrapped_model(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                _adopt(self.model, optimizer)
            self._toggle_params_of_shards()
        _gather_for_averages(trainer, self.model)
        self.setup_precision_plugin()

    def _wrapped_model(self, trainer: Trainer) -> ShardLite:
        module, settings = self.lightning_module, (self._options, self.precision_plugin.precision)
        wrapped, used = vars(module).get(_WRAPPED, (None, None))
        if wrapped is not None and wrapped._unwrapped:
            wrapped = None
        if wrapped is not None and used != settings:
            wrapped.unwrap()
            wrapped = None
        if wrapped is None:
            if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
            wrapped = _wrap(module, self.root_device, self._options)
            vars(module)[_WRAPPED] = wrapped, settings
        return wrapped

    def _toggle_params_of_shards(self) -> None:
        """Let `toggle_optimizer` freeze parameters. Those of the optimizers are shards, which do not require less."""
        param_of = dict(zip(self.model.parameters(), self.model.module.parameters(), strict=True))
        module = vars(self.lightning_module)

        def params_of(optimizer: Any) -> list[Tensor]:
            return [param_of.get(each, each) for group in optimizer.param_groups for each in group["params"]]

        def toggle_optimizer(optimizer: Any) -> None:
            state = {param: param.requires_grad for each in self.optimizers for param in params_of(each)}
            own = set(params_of(optimizer))
            for param, required in state.items():
                param.requires_grad = required and param in own
            module["_param_requires_grad_state"] = state

        def untoggle_optimizer(optimizer: Any) -> None:
            state, own = module["_param_requires_grad_state"], set(params_of(optimizer))
            for param in state.keys() - own:
                param.requires_grad = state[param]
            module["_param_requires_grad_state"] = {}

        module.update(toggle_optimizer=toggle_optimizer, untoggle_optimizer=untoggle_optimizer)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Return a context that accumulates gradients. The Trainer enters it for all batches of a step but the last."""
        return self.model.no_sync()

    def teardown(self) -> None:
        """Leave the model where it is: a sharded model cannot be moved."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights on rank 0, which writes the checkpoint. Collective."""
        if not isinstance(self.model, ShardLite):
            return super().lightning_module_state_dict()
        if type(self.lightning_module).state_dict is nn.Module.state_dict:
            return self.model.full_state_dict(rank=0)
        with self.model.gathered(writeback=False):  # the program chooses what it saves
            state = self.lightning_module.state_dict() if self.is_global_zero else {}
            return {name: _on_cpu(value) for name, value in state.items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights: those of rank 0, if the module is sharded."""
        wrapped, _ = vars(self.lightning_module).get(_WRAPPED, (None, None))
        if wrapped is None or wrapped._unwrapped:
            super().load_model_state_dict(checkpoint, strict)
        else:
            wrapped.load_full_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on rank 0. Collective."""
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if isinstance(self.model, ShardLite) and _holds(bare, self.model):
            return shardlite.full_optimizer_state(self.model, bare, rank=0)
        return super().optimizer_state(bare)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole optimizer states, of any number of ranks and of any strategy. Collective."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if _holds(optimizer, self.model):
                shardlite.load_optimizer_state(self.model, optimizer, state)
            else:
                optimizer.load_state_dict(state)


# ---- Fabric ---------------------------------------------------------------------------------------------------------


class ShardLiteFabricStrategy(FabricDDPStrategy):
    """Strategy of Lightning's `Fabric` that shards models.

    `fabric.setup(model, optimizer)`, and `fabric.setup_module(model)` followed by `fabric.setup_optimizers(optimizer)`,
    wrap the model and give shards to the optimizer. The optimizer may be built before or after.

    Args:
        stage: ZeRO stage, as for `ShardLite`.
        options: as for `ShardLiteStrategy`, with `precision_plugin` instead of `precision` for Lightning's plugin.

    Raises:
        TypeError: an option is unknown.
        ValueError: `stage` is not 0, 1, 2 or 3.

    Example:
        >>> fabric = Fabric(strategy=ShardLiteFabricStrategy(stage=3), devices=2)
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(model, optimizer)
    """

    def __init__(self, stage: int = 3, **options: Any) -> None:
        own, self._options = _split_options(type(self).__name__, FabricDDPStrategy, stage, options)
        if "precision_plugin" in own:
            own["precision"] = own.pop("precision_plugin")
        super().__init__(**own)
        self._backward_sync_control = _NoSync()
        self._wrapped: WeakSet[ShardLite] = WeakSet()

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module, unless it has no memory yet."""
        if not any(param.is_meta for param in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> ShardLite:
        """Wrap a module."""
        _refuse_precision(self.precision)
        wrapped = _wrap(module, self.root_device, self._options)
        self._wrapped.add(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give shards to an optimizer."""
        for model in self._wrapped:
            if not model._unwrapped:
                _adopt(model, optimizer)
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights on rank 0. Collective."""
        return module.full_state_dict(rank=0) if isinstance(module, ShardLite) else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load rank 0's whole weights. Collective."""
        if isinstance(module, ShardLite):
            module.load_full_state_dict(state_dict, strict)
        else:
            super().load_module_state_dict(module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on rank 0. Collective."""
        model = self._model_of(optimizer)
        if model is None:
            return super().get_optimizer_state(optimizer)
        return shardlite.full_optimizer_state(model, optimizer, rank=0)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        """Load a file into the objects of `state`. Optimizers load whole states. Collective."""
        if isinstance(state, Optimizer):
            _State(self, state).load_state_dict(self.checkpoint_io.load_checkpoint(path, **options))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, **options)
        inner = {key: _State(self, each) if isinstance(each, Optimizer) else each for key, each in state.items()}
        rest = super().load_checkpoint(path, inner, strict, **options)
        state.update({key: each for key, each in inner.items() if not isinstance(each, _State)})
        return rest

    def _model_of(self, optimizer: Optimizer) -> ShardLite | None:
        living = (model for model in self._wrapped if not model._unwrapped)
        return next((model for model in living if _holds(optimizer, model)), None)


class _NoSync(_BackwardSyncControl):
    """Lets `fabric.no_backward_sync` accumulate gradients."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return `no_sync()` of the model if `enabled`."""
        return module.no_sync() if enabled else nullcontext()


class _State:
    """The state of an optimizer, to which `load_checkpoint` gives a whole state."""

    def __init__(self, strategy: ShardLiteFabricStrategy, optimizer: Optimizer) -> None:
        self._strategy, self._optimizer = strategy, optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.get_optimizer_state(self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model = self._strategy._model_of(self._optimizer)
        if model is None:
            self._optimizer.load_state_dict(state)
        else:
            shardlite.load_optimizer_state(model, self._optimizer, state)


# ---- both -----------------------------------------------------------------------------------------------------------

_OWN = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
_OWN += ("process_group_backend", "start_method")


def _split_options(
    name: str, base: type, stage: int, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords of `DDPStrategy`, and those of `ShardLite`."""
    known = inspect.signature(ShardLite.__init__).parameters.keys() - {"self", "module", "device", "deprecated"}
    if unknown := options.keys() - known - {*_OWN}:
        raise TypeError(f"{name} got unknown options {sorted(unknown)}: it takes {sorted(known | {*_OWN})}")
    if stage not in range(4):
        raise ValueError(f"{name}(stage={stage!r}): the stages are 0, 1, 2 and 3")
    own = {key: value for key, value in options.items() if key in _OWN or key == "timeout"}
    return own, {"stage": stage, **{key: value for key, value in options.items() if key not in _OWN}}


def _refuse_precision(plugin: Any) -> None:
    """Raise `ValueError` for plugins that replace the layers of a module."""
    name = type(plugin).__name__
    if name in ("BitsandbytesPrecision", "TransformerEnginePrecision"):
        raise ValueError(
            f"{name} with ShardLite was not tried: use precision='bf16-mixed', '16-mixed', 'bf16-true' or '32-true', or "
            "ShardLiteStrategy(precision=shardlite.Precision(...))"
        )


def _wrap(module: nn.Module, device: torch.device, options: Mapping[str, Any]) -> ShardLite:
    if not any(param.is_meta for param in module.parameters()):
        module.to(device)
    wrapped = ShardLite(module, device=device, **options)
    _models.add(wrapped)
    return wrapped


def _adopt(model: ShardLite, optimizer: Optimizer) -> None:
    """Replace the parameters of `model` in an optimizer by their shards, if the optimizer holds any."""
    params = set(model.module.parameters())
    if any(param in params for group in optimizer.param_groups for param in group["params"]):
        model.adopt(optimizer)


def _holds(optimizer: Optimizer, model: ShardLite) -> bool:
    """Return whether an optimizer holds shards of `model`."""
    shards = set(model.parameters())
    return any(param in shards for group in optimizer.param_groups for param in group["params"])


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# ---- callbacks and functions that read weights ------------------------------------------------------------------------


def _gather_for_averages(trainer: Trainer, model: ShardLite) -> None:
    """Let callbacks that average weights read whole weights, and write them."""
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            _gather_in(callback, "update_parameters", model, writeback=False)
            _gather_in(callback, "transfer_weights", model)
        if isinstance(callback, WeightAveraging):
            _gather_in(callback, "_swap_models", model)
            _gather_in(callback, "_copy_average_to_current", model)
            if callback._average_model is not None:
                _gather_in(callback._average_model, "update_parameters", model, writeback=False)


def _gather_in(target: Any, name: str, model: ShardLite, *, writeback: bool = True) -> None:
    """Call a method of `target` inside `model.gathered()`."""
    method = getattr(type(target), name).__get__(target, type(target))
    static = isinstance(inspect.getattr_static(type(target), name), staticmethod)
    method = getattr(type(target), name) if static else method

    @wraps(method)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        with model.gathered(writeback=writeback), torch.no_grad():
            return method(*args, **kwargs)

    vars(target)[name] = gathering


def _shards_of(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return the shard of each parameter of the models that `params` belong to."""
    wanted = set(params)
    pairs: dict[Tensor, Tensor] = {}
    for model in list(_models):
        if not model._unwrapped:
            own = dict(zip(model.module.parameters(), model.parameters(), strict=True))
            if wanted & own.keys() or wanted & set(own.values()):
                pairs.update(own)
    return pairs


def _filter_on_optimizer(original: Callable[..., Any], optimizer: Optimizer, params: Iterable[Tensor]) -> Any:
    """Return the shards of parameters that an optimizer does not hold. `original` would compare their values."""
    params = list(params)
    shards = _shards_of(params)
    if not shards:
        return original(optimizer, params)
    held = {param for group in optimizer.param_groups for param in group["params"]}
    return [shard for param in params if (shard := shards.get(param, param)) not in held]


def _apply_mapping(original: Callable[..., Any], groups: list[dict[str, Any]], mapping: Mapping[Any, Any]) -> Any:
    """Replace parameters in groups by names or, if `mapping` maps names, names by shards."""
    found = [each for each in (*mapping, *mapping.values()) if isinstance(each, Tensor)]
    shards = _shards_of(found)
    params = {shard: param for param, shard in shards.items()}
    groups = [{**group, "params": [params.get(each, each) for each in group["params"]]} for group in groups]
    result = original(groups, mapping)
    return [{**group, "params": [shards.get(each, each) for each in group["params"]]} for group in result]


def _patch(name: str, replacement: Callable[..., Any]) -> None:
    """Replace a static method of `BaseFinetuning`."""
    setattr(BaseFinetuning, name, staticmethod(partial(replacement, getattr(BaseFinetuning, name))))


def _whole_grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Any]:
    """Return norms as `lightning.pytorch.utilities.grad_norm` does. Gathers the gradients one by one."""
    params = [param for param in module.parameters() if param.requires_grad]
    wanted = set(params)
    for model in list(_models):
        if model._unwrapped:
            continue
        names = {param: name for name, param in model.module.named_parameters()}
        if wanted & names.keys():
            grads = {name: model.full_grad(names[param]) for name, param in module.named_parameters() if param in wanted}
            shown = SimpleNamespaceModule(grads)
            return _original_grad_norm(shown, norm_type, group_separator)
    return _original_grad_norm(module, norm_type, group_separator)


class SimpleNamespaceModule:
    """What `grad_norm` reads of a module: names, and parameters with gradients."""

    def __init__(self, grads: Mapping[str, Tensor | None]) -> None:
        self._grads = grads

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        for name, grad in self._grads.items():
            param = nn.Parameter(torch.empty(0)) if grad is None else nn.Parameter(torch.empty_like(grad))
            param.grad = grad
            yield name, param


# A program may have imported the function by name, so its code is replaced, and the name keeps its object.
_original_grad_norm = FunctionType(_grad_norm.__code__, _grad_norm.__globals__, "grad_norm", _grad_norm.__defaults__)


def _replacement(module, norm_type, group_separator="/"):  # type: ignore[no-untyped-def]
    """Code of `grad_norm`. Its global names are those of Lightning's module."""
    return _shardlite_grad_norm(module, norm_type, group_separator)  # type: ignore[name-defined]  # noqa: F821


_grad_norm.__globals__["_shardlite_grad_norm"] = _whole_grad_norm
_grad_norm.__code__ = _replacement.__code__
_patch("filter_on_optimizer", _filter_on_optimizer)
_patch("_apply_mapping_to_param_groups", _apply_mapping)
for _registry, _class in ((StrategyRegistry, ShardLiteStrategy), (STRATEGY_REGISTRY, ShardLiteFabricStrategy)):
    _registry.register("shardlite", _class, description="ShardLite, stage 3", override=True)
    for _stage in range(4):
        _registry.register(f"shardlite_stage_{_stage}", _class, "ShardLite", override=True, stage=_stage)
