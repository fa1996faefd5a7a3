"""Small runs of `transformers.Trainer` on the warm cluster, with DDP and with ShardLite in the same processes.

Transformers is imported inside functions, since that takes seconds.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.ranks.scripts import launched

VOCABULARY = 53
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@contextmanager
def session(group: dist.ProcessGroup, folder: Path, *, on_gpu: bool = False) -> Iterator[None]:
    """Be a process that torchrun has started, with no state of accelerate before and after.

    If `on_gpu`, all ranks use the first GPU, over a process group that the program has initialized with gloo.
    """
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    chosen = mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_GPU))

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    with (
        launched(group, [str(folder / "run.py")], folder, "ignore", on_gpu=on_gpu),
        chosen if on_gpu else nullcontext(),
    ):
        reset()
        if on_gpu:
            dist.init_process_group("gloo")
        try:
            yield
        finally:
            reset()


def llama(**settings: Any) -> nn.Module:
    """Return a causal model with norms, and with embedding and head of their own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SIZES | shape | {"num_key_value_heads": 2} | settings))


def gpt2(**settings: Any) -> nn.Module:
    """Return a causal model with dropout, biases and a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(**SIZES | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32} | settings)
    )


def t5(**settings: Any) -> nn.Module:
    """Return an encoder and a decoder that share an embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 19, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**SIZES | shape | settings))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of random tokens, whose labels end at different places."""

    def __init__(self, count: int = 48, seed: int = 0, length: int = 9) -> None:
        random = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, VOCABULARY, (count, length), generator=random)
        self.labels = self.tokens.clone()
        for row in self.labels:
            row[int(torch.randint(4, length, (), generator=random)) :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "learning_rate": 1e-2,
    "optim": "sgd",
    "max_grad_norm": 0.0,  # the norm adds in another order than PyTorch's
}

Maker = Callable[..., Any]
"""Makes a trainer from keywords: those of its class, and `args`, which are keywords of `TrainingArguments`."""


def maker(folder: Path, stage: int | None) -> Maker:
    """Return a function that makes trainers: of Transformers if `stage` is `None`, else sharded ones."""
    from transformers import Trainer, TrainingArguments

    from shardlite.integrations.transformers import ShardLiteMixin

    def make(
        trainer: type = Trainer,
        arguments: type = TrainingArguments,
        args: Mapping[str, Any] = MappingProxyType({}),
        **given: Any,
    ) -> Any:
        options: dict[str, Any] = {"model": llama, "train_dataset": Rows(), "eval_dataset": Rows(10, 5), **given}
        if "model_init" in options:
            del options["model"]
        else:
            options["model"] = options["model"]() if not isinstance(options["model"], nn.Module) else options["model"]
        if stage is not None:
            options["sharding"] = {"stage": stage} | options.pop("sharding", {})
            trainer = type(f"Sharded{trainer.__name__}", (ShardLiteMixin, trainer), {})
        else:
            options.pop("sharding", None)
        return trainer(
            args=arguments(
                **{"output_dir": str(folder), "use_cpu": not torch.cuda.is_available(), **ARGUMENTS, **args}
            ),
            **options,
        )

    return make


def weights(trainer: Any) -> dict[str, Tensor]:
    """Return the whole weights of a trainer's model. Collective."""
    from shardlite import ShardLite

    wrapped = trainer.model_wrapped
    state = wrapped.full_state_dict() if isinstance(wrapped, ShardLite) else trainer.model.state_dict()
    return {name: value.to("cpu", copy=True) for name, value in state.items()}


def history(trainer: Any) -> list[dict[str, Any]]:
    """Return what a trainer has logged, without times and norms."""
    unstable = ("runtime", "per_second", "grad_norm", "preparation")
    return [{k: v for k, v in each.items() if not any(w in k for w in unstable)} for each in trainer.state.log_history]


def norms(trainer: Any) -> list[float]:
    """Return the norms of gradients that a trainer has logged."""
    return [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]


def on_both(
    group: dist.ProcessGroup,
    folder: Path,
    stage: int,
    case: Callable[[Maker], Any],
    args: tuple[Any, ...] = (),
    *,
    on_gpu: bool = False,
) -> tuple[Any, Any]:
    """Return the results of a case with DDP and with ShardLite."""
    with session(group, folder, on_gpu=on_gpu), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(case(maker(folder / name, each), *args) for name, each in (("ddp", None), ("sharded", stage)))  # type: ignore[return-value]
