"""Train with `transformers.Trainer`, and trainers built on it, such as those of TRL: `ShardLiteTrainer` and a mixin.

    from shardlite.integrations.transformers import ShardLiteTrainer

    trainer = ShardLiteTrainer(model=model, args=args, train_dataset=dataset, sharding={"stage": 3})

The model is wrapped where `Trainer` would wrap it with `DistributedDataParallel`: at the first training or evaluation.
`trainer.model` stays the Transformers model, and `trainer.model_wrapped` becomes the `ShardLite` model. In one process
without a launcher nothing is wrapped, and the program is warned.

Tried with transformers 5.23.0, accelerate 1.15.0, peft 0.21.2 and trl 1.16.0.
"""

import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlite import (
    LayoutError,
    Precision,
    ShardLite,
    ShardWarning,
    WholeParameters,
    full_optimizer_state,
    load,
    load_optimizer_state,
    save,
)
from shardlite.extend import install, models_of, patch, steps_shards
from shardlite.integrations._adapters import adapter_files, adapter_weights, savable
from shardlite.integrations._wrapping import (
    Original,
    bare,
    check_options,
    check_processes,
    gather_in,
    params_of,
    read_on_first,
    replaced,
    required,
    shards_of,
    together,
)

with required(__name__, "transformers >= 5.23 and accelerate >= 1.15", "transformers"):
    import transformers.trainer
    from accelerate import Accelerator
    from transformers import PreTrainedModel, Trainer
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.training_args import ParallelMode

    from shardlite.integrations._accelerator import FOLDER, STATE, digests, read_pretrained, read_state, wrap

OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor", "schedule_free_adamw"),
    *("schedule_free_sgd", "schedule_free_radam", "lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"),
)
"""Values of `TrainingArguments(optim=...)` that are accepted. Adafactor steps whole parameters (`WholeParameters`)."""

_NEEDS_MODEL = ("galore", "apollo", "lomo")
"""Parts of the names of optimizers whose classes need more than parameters and options."""

_OWN_ITEMS = {"average_tokens_across_devices": False}  # neither gathers counts, nor multiplies losses by the ranks
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}

_Base: Any = object
"""Base class without types, because the mixin calls methods of `Trainer` on `self` and `super()`."""


class ShardLiteMixin(_Base):  # type: ignore[misc]
    """Mixin that makes a `transformers.Trainer` shard its model. List it before the class of the trainer.

    Args:
        sharding: keywords of `ShardLite`, such as `stage`, `units` and `route`, except `device`. `precision` defaults
            to `Precision(compute=torch.bfloat16)` if the arguments have `bf16=True`, and to `torch.float16` if they
            have `fp16=True`, both inside autocast as `Trainer` has it. `buffers` defaults to `"own"` if the arguments
            have `ddp_broadcast_buffers=False`, and `timeout` to `ddp_timeout`. `group` must have all ranks. Defaults to
            the class attribute `sharding`.
        args, kwargs: arguments of the trainer.

    Raises:
        TypeError: `sharding` has a keyword that `ShardLite` does not have.
        ValueError: the arguments ask for something that a sharded model cannot do, such as `fsdp` or `deepspeed`.

    Example:
        >>> class Shards(ShardLiteMixin, SFTTrainer):
        ...     sharding = {"stage": 2}
    """

    sharding: Mapping[str, Any] = {}
    """Keywords of `ShardLite`, if the constructor gets none."""

    whole_optimizer_state = False
    """Whether checkpoints contain the full optimizer state in `optimizer.pt`, as those of `Trainer`, instead of shards.

    `Trainer` can resume from such a checkpoint. Rank 0 needs memory for the full state.
    """

    counts_items = False
    """Whether to send counts of items (tokens) with the gradients, by `ShardLite.count_items`.

    `Trainer` gathers the counts before each step instead. Both divide gradients by the items of all ranks. If counts
    travel with the gradients, a logged loss is the mean over ranks of their own means, and the last bits of gradients
    differ from those of `Trainer`.
    """

    optimizer: Any
    _built_by_trainer = False
    _items: Tensor | int | None = None  # this rank's items in the step, until the first backward of the step
    _factor: Tensor | None = None  # the same number, or 1 if it is 0
    _unloaded: str | None = None  # the folder with the weights that are loaded when the model is wrapped

    def __init__(self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.sharding = dict(self.sharding if sharding is None else sharding)
        check_options(f"{type(self).__name__}(sharding=...)", self.sharding)
        super().__init__(*args, **kwargs)
        if hasattr(self, "_dist"):  # of TRL's trainers that generate
            self._dist.summon_full_params = self._summon_full_params

    # ---- wrapping ---------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which unwraps `ShardLite` models too."""
        _refuse(self.args)
        install("transformers")
        install("accelerate")
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(f"{__name__}: the launcher enables FSDP or DeepSpeed: start the program with torchrun")
        run_backward = self.accelerator.backward
        self.accelerator.backward = lambda loss, **kwargs: run_backward(self._before_backward(loss), **kwargs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do not move a model whose shards are moved when it is wrapped."""
        whole = self.sharding.get("stage", 3) < 3 or self.args.place_model_on_device
        whole = whole and not any(param.is_meta for param in model.parameters())
        if not self._shards or (whole and self._sharded_model(model) is None):
            super()._move_model_to_device(model, device)

    @property
    def _shards(self) -> bool:
        return bool(self.args.parallel_mode == ParallelMode.DISTRIBUTED)

    def _sharded_model(self, model: nn.Module | None = None) -> ShardLite | None:
        """Return the `ShardLite` model that is `model` or wraps `model`."""
        model, wrapped = self.model if model is None else model, getattr(self, "model_wrapped", None)
        known = isinstance(wrapped, ShardLite) and (model is wrapped or model is wrapped.module)
        return wrapped if known else None

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Keep the wrapped model: its weights are sharded already."""
        wrapped = self._sharded_model()
        super()._update_auto_batch_size(batch_size)
        if wrapped is not None:
            self.model_wrapped = wrapped

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Wrap the model. Evaluation runs the wrapped model too."""
        if not self._shards:
            check_processes(type(self).__name__, 1, on_cpus="TrainingArguments(use_cpu=True)", shards=False)
            return super()._wrap_model(model, training, dataloader)
        wrapped = self._sharded_model(model)
        if wrapped is None:
            if models_of(model.parameters()):
                raise ValueError(
                    "the model is sharded by an earlier trainer: pass what `trainer.model_wrapped.unwrap()` of that "
                    "trainer returns, or train again with that trainer"
                )
            full = self.args.bf16_full_eval or self.args.fp16_full_eval
            if full and not self.is_in_train:  # `Trainer` converts the model for good
                model.to(torch.bfloat16 if self.args.bf16_full_eval else torch.float16)
            options = {"timeout": timedelta(seconds=self.args.ddp_timeout), **self.sharding}
            wrapped = _wrap(model, self.accelerator, options)
            self.model_wrapped = wrapped
        if self._unloaded is not None:
            folder, self._unloaded = self._unloaded, None
            self._load_weights(wrapped, folder)
        if wrapped not in self.accelerator._models:
            self.accelerator._models.append(wrapped)
        if training and self.optimizer is not None:
            self._hand_shards(wrapped)
        return wrapped

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does. `resume_from_checkpoint=True` skips unfinished checkpoints.

        Raises:
            ValueError: the arguments have `bf16_full_eval`, `fp16_full_eval`, or `sync_each_batch` with `counts_items`.
        """
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if self._shards and getattr(self.args, name):
                raise ValueError(
                    f"{name}=True would convert the model after training, which is not possible for a sharded model: "
                    f"set {name[:4]}=True, or evaluate with another trainer"
                )
        settings = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        if self._shards and self.counts_items and settings.get("sync_each_batch"):
            raise ValueError(
                "sync_each_batch=True reduces each batch, counts_items=True counts whole steps: disable one"
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_finished(Path(self.args.output_dir)) or True
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.is_in_train = False  # also after an error

    # ---- counts of items --------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Read the batches of a step. If counts travel with the gradients, count this rank's items only."""
        self._items = self._factor = None
        if not (self.counts_items and self._shards):
            return super().get_batch_samples(*args, **kwargs)
        with replaced(self.args, **_OWN_ITEMS):
            batches, items = super().get_batch_samples(*args, **kwargs)
        if items is not None:
            self._items, self._factor = items, torch.as_tensor(items).clamp(min=1)
        return batches, self._factor

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the trainer does. It is a mean over this rank's items, if `counts_items` is set."""
        counts = self.counts_items and self._shards and self.model.training
        with replaced(self.args, **_OWN_ITEMS) if counts else nullcontext():
            return super().compute_loss(*args, **kwargs)

    def _before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss that is differentiated: the sum over items, if counts travel with the gradients."""
        wrapped = self._sharded_model()
        if not self.counts_items or wrapped is None or self._factor is None:
            return loss
        wrapped.count_items(0 if self._items is None else self._items)  # of the whole step, at its first backward
        self._items = None
        return loss * self._factor

    # ---- optimizer --------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer from the module's parameters. It gets shards when the model is wrapped."""
        if self.optimizer is None and self._shards:
            name = str(getattr(self.args.optim, "value", self.args.optim))
            if self.optimizer_cls_and_kwargs is None and name not in OPTIMIZERS:
                instead = ", or pass optimizer_cls_and_kwargs=(the class, its options), which is checked"
                raise ValueError(
                    f"optim={name!r} was not tried with sharded weights: use one of {sorted(OPTIMIZERS)}"
                    f"{'' if any(each in name for each in _NEEDS_MODEL) else instead}"
                )
            self._built_by_trainer = True
        return super().create_optimizer(model)

    def _hand_shards(self, wrapped: ShardLite) -> None:
        """Replace parameters by shards in the optimizer. If it needs whole parameters, build it anew."""
        optimizer = bare(self.optimizer)
        name, held = type(optimizer).__name__, params_of(optimizer)
        if wrapped not in models_of(held):
            raise LayoutError(f"{name} holds no parameter of the trainer's model")
        if shards_of(held).keys().isdisjoint(held):
            return
        if steps_shards(optimizer):
            wrapped.adopt(optimizer)
            return
        if not self._built_by_trainer:
            raise LayoutError(
                f"optimizers=({name}, ...): {name} needs whole parameters: pass optimizer_cls_and_kwargs=({name}, its "
                "options), so that the trainer builds it from the sharded model"
            )
        groups = [group for group in optimizer.param_groups if group["params"]]
        _, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = WholeParameters(groups, type(optimizer), **options)

    def add_callback(self, callback: Any) -> None:
        """Add a callback. TRL's `SyncRefModelCallback` gets full weights."""
        super().add_callback(callback)
        if type(callback).__name__ == "SyncRefModelCallback":
            gather_in(callback, "sync_target_model", self._sharded_model)

    def _summon_full_params(self, model: nn.Module, **_: object) -> AbstractContextManager[None]:
        """Gather all weights while TRL generates, if its arguments have `ds3_gather_for_generation` (the default)."""
        wrapped = self._sharded_model(model) if getattr(self.args, "ds3_gather_for_generation", True) else None
        return nullcontext() if wrapped is None else wrapped.gathered(writeback=False)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, in place of one that an earlier run has left in the same folder."""
        if self._sharded_model() is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # without it, an unfinished checkpoint is not resumed
            (folder / STATE).unlink(missing_ok=True)
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save full weights in a folder that `from_pretrained` reads. Collective."""
        wrapped = self._sharded_model()
        if wrapped is None and self._shards and any(param.is_meta for param in self.model.parameters()):
            wrapped = self._wrap_model(self.model, training=False)  # which reads the weights
        if wrapped is None:
            super()._save(output_dir, state_dict)
            return
        if state_dict is None:
            rank = None if self.args.save_on_each_node else 0
            adapters = adapter_weights(wrapped, rank)  # without the frozen base
            state_dict = wrapped.full_state_dict(rank=rank) if adapters is None else adapters
        save_files = super()._save
        with savable(wrapped, state_dict):  # a trainer of the program may leave `state_dict` unread
            together(wrapped, "save the model", lambda: self.args.should_save and save_files(output_dir, state_dict))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the shards, or the full state on rank 0."""
        wrapped = self._sharded_model()
        if wrapped is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer, folder = bare(self.optimizer), Path(output_dir)
        if self.whole_optimizer_state:
            state = full_optimizer_state(wrapped, optimizer, rank=0)
        else:
            save(folder / FOLDER, wrapped, optimizer)
            # Without this file, `Trainer` would resume with a new state, and say nothing.
            state = {"state": {}, "param_groups": [], "weights": digests(folder) if self.args.should_save else {}}
        if self.args.should_save:
            torch.save(state, folder / STATE)
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights, or remember to load them when the model is wrapped."""
        wrapped = self._sharded_model(model)
        if not self._shards:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self.is_in_train and Path(resume_from_checkpoint, FOLDER).exists():
            return  # they are loaded with the optimizer's state
        elif wrapped is None:
            self._unloaded = resume_from_checkpoint
        else:
            self._load_weights(wrapped, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the shards, at any number of ranks, or the state that `Trainer` has saved."""
        wrapped = self._sharded_model()
        if checkpoint is not None and wrapped is None and Path(checkpoint, FOLDER).exists():
            raise LayoutError(f"{checkpoint} has the optimizer's state in shards: start the program with torchrun")
        if checkpoint is None or wrapped is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, optimizer = Path(checkpoint), bare(self.optimizer)
        state = read_on_first(wrapped, f"load {folder / STATE}", lambda: read_state(folder))
        if (folder / FOLDER).exists():
            load(folder / FOLDER, wrapped, optimizer)
        elif (folder / STATE).exists():
            load_optimizer_state(wrapped, optimizer, state)
        scheduler = folder / "scheduler.pt"
        if scheduler.exists():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        """Load the best weights into the shards."""
        wrapped = self._sharded_model()
        if wrapped is None:
            super()._load_best_model()
        else:
            self._load_weights(wrapped, self.state.best_model_checkpoint)

    def _load_weights(self, wrapped: ShardLite, folder: str) -> None:
        """Load the weights of a checkpoint: its shards, or what `save_pretrained` has written. Collective."""
        if Path(folder, FOLDER).exists():
            read_on_first(wrapped, f"load {folder}", lambda: read_state(Path(folder)))
            load(Path(folder, FOLDER), wrapped)
            return
        state = read_on_first(wrapped, f"load {folder}", lambda: read_pretrained(Path(folder), wrapped))
        result = wrapped.load_full_state_dict(state, strict=False)
        if not adapter_files(wrapped, Path(folder)):
            self._issue_warnings_after_load(result)


class ShardLiteTrainer(ShardLiteMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose model is sharded. See `ShardLiteMixin` for the keyword `sharding`.

    Example:
        >>> trainer = ShardLiteTrainer(model=model, args=args, train_dataset=dataset, sharding={"stage": 3})
        >>> trainer.train()
    """


def _refuse(args: Any) -> None:
    """Raise `ValueError` for arguments that would shard the model too."""
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(args, name, None):
            raise ValueError(f"{__name__}: {name} would shard the model too: remove it from the arguments")
    if args.n_gpu > 1:
        raise ValueError(f"{__name__}: one process uses {args.n_gpu} GPUs: start a process for each with torchrun")


def _wrap(model: nn.Module, accelerator: Accelerator, sharding: Mapping[str, Any]) -> ShardLite:
    group: Any = sharding.get("group")
    size = group.size() if hasattr(group, "size") else accelerator.num_processes
    if size != accelerator.num_processes:
        raise ValueError(
            f"sharding: group has {size} of {accelerator.num_processes} ranks, and others would train models "
            "of their own: pass a mesh (replicate, shard) of all ranks"
        )
    options = {"precision": Precision(compute=_COMPUTE.get(accelerator.mixed_precision)), **sharding}
    wrapped = wrap(accelerator, model, accelerator.prepare_model, options)
    if wrapped.stage == 3:
        for module in wrapped.module.modules():
            if isinstance(module, PreTrainedModel):
                module._is_fsdp_managed_module = True  # `generate` runs equally often on all ranks
    return wrapped


def _last_finished(folder: Path) -> str | None:
    """Return the last checkpoint in a folder whose save has ended, because the state of the trainer is written last."""
    found = {int(each.name.rpartition("-")[2]): each for each in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*[0-9]")}
    for _, each in sorted(found.items(), reverse=True):
        with suppress(OSError, ValueError):
            json.loads((each / TRAINER_STATE_NAME).read_text())
            return str(each)
        warnings.warn(f"{each} is passed over: its save has not ended", ShardWarning, stacklevel=3)
    return None


@patch(transformers.trainer, "get_model_param_count", package="transformers")
def _full_param_count(original: Original, model: nn.Module, trainable_only: bool = False) -> int:
    """Trainer would log the number of elements of one rank."""
    return int(original(model.module if isinstance(model, ShardLite) else model, trainable_only))


HOOKS = (
    *("create_accelerator_and_postprocess", "_move_model_to_device", "_update_auto_batch_size", "_wrap_model"),
    *("get_batch_samples", "compute_loss", "create_optimizer", "add_callback", "_save_checkpoint", "_save"),
    *("_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model"),
    *("_get_output_dir", "_issue_warnings_after_load"),
)
"""Methods of `Trainer` that the mixin overrides or calls."""

if _lacking := [name for name in HOOKS if not hasattr(Trainer, name)]:
    raise ImportError(
        f"{__name__}: Trainer of transformers {transformers.__version__} lacks {_lacking}, so "
        "models would not be sharded: install a version that was tried, such as 5.23"
    )
