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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardlite
from shardlite.integrations._wrapping import adopt, check_options, holds
from shardlite.model import ShardLite

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    raise ImportError(
        "shardlite.integrations.lightning: pytorch_lightning is already imported, and its classes differ from "
        "lightning's: write `from lightning.pytorch import Trainer, LightningModule`"
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
    from lightning.pytorch.utilities.grads import grad_norm
except ImportError as error:
    raise ModuleNotFoundError(
        "shardlite.integrations.lightning requires lightning >= 2.6: pip install 'shardlite[lightning]' "
        "(pytorch_lightning and lightning_fabric are other packages, which it does not work with)",
        name=error.name,
    ) from error

__all__ = ["ShardLiteFabricStrategy", "ShardLiteStrategy"]

_models: "WeakSet[ShardLite]" = WeakSet()
"""All models that strategies have wrapped."""


class _Wrapping:
    """Attribute of a `LightningModule`: the wrapped model, and the settings with which it was wrapped.

    It keeps the model alive between trainers. Copies of the module have no wrapped model.
    """

    NAME = "_shardlite_wrapping"

    def __init__(self, model: ShardLite | None = None, settings: Any = None) -> None:
        self.model, self.settings = model, settings

    def __deepcopy__(self, _: Any) -> "_Wrapping":
        return _Wrapping()

    def __reduce__(self) -> Any:
        return _Wrapping, ()

    @classmethod
    def of(cls, module: nn.Module) -> "_Wrapping":
        """Return the attribute of a module. Its model is `None` if the module is not wrapped now."""
        found = vars(module).get(cls.NAME)
        return cls() if found is None or found.model is None or found.model._unwrapped else found


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
        """Begin to use a module."""
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
        known = _Wrapping.of(module)
        if known.model is not None and known.settings == settings:
            return known.model
        if known.model is not None:
            known.model.unwrap()
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        wrapped = _wrap(module, self.root_device, self._options)
        setattr(module, _Wrapping.NAME, _Wrapping(wrapped, settings))
        return wrapped

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
        if not any(map(_chooses_state, self.lightning_module.modules())):
            return self.model.full_state_dict(rank=0)
        with self.model.gathered(writeback=False):
            state = self.lightning_module.state_dict()
            return {name: _on_cpu(value) for name, value in state.items()} if self.is_global_zero else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights: those of rank 0, if the module is sharded."""
        wrapped = _Wrapping.of(self.lightning_module).model
        if wrapped is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            wrapped.load_full_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on rank 0. Collective."""
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if isinstance(self.model, ShardLite) and holds(bare, self.model):
            return shardlite.full_optimizer_state(self.model, bare, rank=0)
        return super().optimizer_state(bare)  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole optimizer states, of any number of ranks and of any strategy. Collective."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if holds(optimizer, self.model):
                shardlite.load_optimizer_state(self.model, optimizer, state)
            else:
                optimizer.load_state_dict(state)


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
        self._wrapped: WeakValueDictionary[int, ShardLite] = WeakValueDictionary()  # in the order of wrapping

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module, unless it has no memory yet."""
        if not any(param.is_meta for param in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> ShardLite:
        """Wrap a module."""
        _refuse_precision(self.precision)
        wrapped = _wrap(module, self.root_device, self._options)
        self._wrapped[id(wrapped)] = wrapped
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give shards to an optimizer."""
        for model in self._living():
            adopt(model, optimizer)
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights on rank 0. Collective."""
        if isinstance(module, ShardLite):
            return module.full_state_dict(rank=0)
        return super().get_module_state_dict(module)  # type: ignore[no-any-return]

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
            return super().get_optimizer_state(optimizer)  # type: ignore[no-any-return]
        return shardlite.full_optimizer_state(model, optimizer, rank=0)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        """Load a file into the objects of `state`. Optimizers load whole states. Collective."""
        if isinstance(state, Optimizer):
            _State(self, state).load_state_dict(self.checkpoint_io.load_checkpoint(path, **options))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, **options)  # type: ignore[no-any-return]
        inner = {key: _State(self, each) if isinstance(each, Optimizer) else each for key, each in state.items()}
        rest = super().load_checkpoint(path, inner, strict, **options)
        state.update({key: each for key, each in inner.items() if not isinstance(each, _State)})
        return rest  # type: ignore[no-any-return]

    def _model_of(self, optimizer: Optimizer) -> ShardLite | None:
        return next((model for model in self._living() if holds(optimizer, model)), None)

    def _living(self) -> list[ShardLite]:
        return [model for model in self._wrapped.values() if not model._unwrapped]


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    """Lets `fabric.no_backward_sync` accumulate gradients."""

    def no_backward_sync(self, module: ShardLite, enabled: bool) -> AbstractContextManager[None]:
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

_OWN = frozenset(
    {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
        *("process_group_backend", "start_method"),
    }
)


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
    _patch_lightning()
    if not any(param.is_meta for param in module.parameters()):
        module.to(device)
    wrapped = ShardLite(module, device=device, **options)
    _models.add(wrapped)
    return wrapped


def _chooses_state(module: nn.Module) -> bool:
    """Return whether a module saves other things than its parameters and buffers."""
    names = ("state_dict", "_save_to_state_dict", "get_extra_state")
    overrides = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)
    return overrides or bool(module._state_dict_hooks)


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# ---- callbacks and functions that read weights ----------------------------------------------------------------------


def _gather_for_averages(trainer: Trainer, model: ShardLite) -> None:
    """Let callbacks that average weights read whole weights, and write them."""
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            _gather_in(callback, "update_parameters", model, writeback=False)
            _gather_in(callback, "transfer_weights", model)
        if isinstance(callback, WeightAveraging):
            for name in ("_swap_models", "_copy_average_to_current", "on_load_checkpoint"):
                _gather_in(callback, name, model)
            if callback._average_model is not None:
                _gather_in(callback._average_model, "update_parameters", model, writeback=False)


def _gather_in(target: Any, name: str, model: ShardLite, *, writeback: bool = True) -> None:
    """Call a method of `target` inside `model.gathered()`."""
    vars(target).pop(name, None)
    method = getattr(target, name)

    @wraps(method)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if model._unwrapped else model.gathered(writeback=writeback), torch.no_grad():
            return method(*args, **kwargs)

    vars(target)[name] = gathering


def _toggle_optimizer(original: Callable[..., None], module: LightningModule, optimizer: Any) -> None:
    """Freeze the module's parameters of other optimizers, because freezing their shards has no effect."""
    wrapped = _Wrapping.of(module).model
    if wrapped is None:
        original(module, optimizer)
        return
    state = {param: param.requires_grad for each in module.trainer.optimizers for param in _own_params(each, wrapped)}
    own = set(_own_params(optimizer, wrapped))
    for param, required in state.items():
        param.requires_grad = required and param in own
    module._param_requires_grad_state = state


def _untoggle_optimizer(original: Callable[..., None], module: LightningModule, optimizer: Any) -> None:
    """Undo `_toggle_optimizer`."""
    wrapped = _Wrapping.of(module).model
    if wrapped is None:
        original(module, optimizer)
        return
    own = set(_own_params(optimizer, wrapped))
    for param, required in module._param_requires_grad_state.items():
        if param not in own:
            param.requires_grad = required
    module._param_requires_grad_state = {}


def _own_params(optimizer: Any, model: ShardLite) -> list[Tensor]:
    """Return the parameters whose shards an optimizer holds."""
    param_of = dict(zip(model.parameters(), model.module.parameters(), strict=True))
    return [param_of.get(each, each) for group in optimizer.param_groups for each in group["params"]]


def _shards_of(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return the shard of each parameter of the models that `params` belong to."""
    wanted = set(params)
    pairs: dict[Tensor, Tensor] = {}
    for model in list(_models):
        if not model._unwrapped:
            own: dict[Tensor, Tensor] = dict(zip(model.module.parameters(), model.parameters(), strict=True))
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


def _whole_grad_norm(
    original: Callable[..., Any], module: nn.Module, norm_type: float | str, group_separator: str = "/"
) -> Any:
    """Return norms of whole gradients, which are gathered one after the other. `original` would see parts."""
    params = {param: name for name, param in module.named_parameters() if param.requires_grad}
    for model in list(_models):
        names = {} if model._unwrapped else {param: name for name, param in model.module.named_parameters()}
        if params.keys() & names.keys():
            grads = {name: model.full_grad(names[param]) for param, name in params.items()}
            return original(_Gradients(grads), norm_type, group_separator)
    return original(module, norm_type, group_separator)


class _Gradients(nn.Module):
    """A module of which only the gradients exist."""

    def __init__(self, grads: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self._grads = grads

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Yield names, and objects with a gradient."""
        for name, grad in self._grads.items():
            yield name, SimpleNamespace(grad=grad)


# ---- patches of Lightning -------------------------------------------------------------------------------------------


def _replace(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method. `replacement` is called with the original function first."""
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(method) if static else method)


def _replace_code(function: FunctionType, replacement: Callable[..., Any]) -> None:
    """Replace the code of `grad_norm`. Programs have imported it by name, so the name must keep its object."""
    names = function.__globals__
    original = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    names["_shardlite_grad_norm"] = partial(replacement, original)
    function.__code__ = _code.__code__


def _code(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
    """Code of `grad_norm`. Its global names are those of Lightning's module."""
    return _shardlite_grad_norm(module, norm_type, group_separator)  # type: ignore[name-defined]  # noqa: F821


@cache
def _patch_lightning() -> None:
    """Change functions of Lightning, once."""
    _replace(LightningModule, "toggle_optimizer", _toggle_optimizer)
    _replace(LightningModule, "untoggle_optimizer", _untoggle_optimizer)
    _replace(BaseFinetuning, "filter_on_optimizer", _filter_on_optimizer)
    _replace(BaseFinetuning, "_apply_mapping_to_param_groups", _apply_mapping)
    _replace_code(grad_norm, _whole_grad_norm)


for _registry, _strategy in ((StrategyRegistry, ShardLiteStrategy), (STRATEGY_REGISTRY, ShardLiteFabricStrategy)):
    _registry.register("shardlite", _strategy, "ShardLite, stage 3", override=True)
    for _stage in range(4):
        _registry.register(f"shardlite_stage_{_stage}", _strategy, "ShardLite", override=True, stage=_stage)
