"""`transformers.Trainer` with ShardLite: equal to the bit to the same program with DDP."""

import inspect
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.ranks.scripts import ROOT, run_script
from tests.support.trainers import (
    SIZES,
    VOCABULARY,
    Maker,
    Rows,
    gpt2,
    history,
    llama,
    norms,
    on_both,
    session,
    t5,
    weights,
)

pytest.importorskip("transformers", "5.23", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

EXAMPLE = ROOT / "examples" / "trainer.py"
STAGES = pytest.mark.parametrize("stage", [3, 2])


def assert_same(plain: Any, sharded: Any) -> None:
    """Check that results are equal, tensors to the bit."""
    if isinstance(plain, Tensor):
        torch.testing.assert_close(sharded, plain, rtol=0, atol=0, equal_nan=True)
    elif isinstance(plain, dict):
        assert plain.keys() == sharded.keys()
        for key in plain:
            assert_same(plain[key], sharded[key])
    elif isinstance(plain, (list, tuple)):
        assert len(plain) == len(sharded), (plain, sharded)
        for each, other in zip(plain, sharded, strict=True):
            assert_same(each, other)
    else:
        assert plain == sharded, (plain, sharded)


def same_as_ddp(group: Any, folder: Path, stage: int, case: Any, *args: Any) -> None:
    """Body of a rank: run a case with both and compare what it returns."""
    plain, sharded = on_both(group, folder, stage, case, args)
    assert_same(plain, sharded)


def trained(trainer: Any) -> list[Any]:
    trainer.train()
    return [history(trainer), weights(trainer)]


# ---- cases ----------------------------------------------------------------------------------------------------------


def train_evaluate_predict(make: Maker) -> Any:
    trainer = make(args={"eval_strategy": "steps", "eval_steps": 2, "include_num_input_tokens_seen": "all"})
    found = trained(trainer)
    predicted = trainer.predict(Rows(7, 9))
    return [*found, trainer.evaluate()["eval_loss"], torch.tensor(predicted.predictions)]


def adamw(make: Maker) -> Any:
    return trained(make(args={"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-3}))


def dropout(make: Maker) -> Any:
    return trained(make(model=gpt2))


def accumulation(make: Maker) -> Any:
    return trained(make(args={"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}))


def own_tokens(make: Maker) -> Any:
    return trained(make(args={"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}))


def checkpointing(make: Maker) -> Any:
    return trained(make(model=gpt2, args={"gradient_checkpointing": True}))


def reentrant(make: Maker) -> Any:
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    return trained(make(args={**more, "ddp_find_unused_parameters": False}))


def label_smoothing(make: Maker) -> Any:
    trainer = make(args={"label_smoothing_factor": 0.1})
    return [trained(trainer), trainer.evaluate()["eval_loss"]]


def neftune(make: Maker) -> Any:
    return trained(make(args={"neftune_noise_alpha": 5.0}))


def evaluate_first(make: Maker) -> Any:
    """Evaluate a trainer before it trains. With DDP that trainer would not average gradients, so it is another one."""
    more = {"eval_on_start": True, "eval_accumulation_steps": 1}
    trainer = make(args=more)
    first = (trainer if hasattr(trainer, "sharding") else make(args=more)).evaluate()["eval_loss"]
    trainer.state.log_history.clear()
    return [first, trained(trainer)]


def train_twice(make: Maker) -> Any:
    trainer = make(args={"optim": "adamw_torch"})
    first = trained(trainer)
    return [first, trained(trainer)]


def train_from_init(make: Maker) -> Any:
    trainer = make(model_init=lambda: llama())
    first = trained(trainer)
    return [first, trained(trainer)]


def generate_after(make: Maker) -> Any:
    trainer = make()
    trainer.train()
    trainer.model.eval()
    start = Rows(2, 7 + trainer.args.process_index).tokens[:, : 3 + trainer.args.process_index]
    return trainer.model.generate(start, max_new_tokens=5, do_sample=False)


def seq2seq(make: Maker) -> Any:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    trainer = make(
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        model=t5,
        args={"predict_with_generate": True, "generation_max_length": 7, "learning_rate": 0.3},
    )
    trainer.train()
    predicted = trainer.predict(Rows(7, 9))
    return [weights(trainer), torch.tensor(predicted.predictions), predicted.metrics["test_loss"]]


def counts(make: Maker) -> Any:
    from transformers import trainer as module

    trainer = make()
    trainer.train()
    whole = module.get_model_param_count(trainer.model_wrapped, trainable_only=True)
    return [whole, trainer.model.num_parameters(), trainer.state.total_flos]


def given_optimizer(make: Maker) -> Any:
    model = llama()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return trained(make(model=model, optimizers=(optimizer, schedule)))


def own_loss(make: Maker) -> Any:
    from transformers import Trainer

    class Squares(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    return trained(make(Squares, args={"gradient_accumulation_steps": 2}))


def loss_function(make: Maker) -> Any:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    return trained(make(compute_loss_func=summed))


def autocast(make: Maker) -> Any:
    from shardlite import Precision

    return trained(make(model=gpt2, args={"bf16": True}, sharding={"precision": Precision()}))


def lora(make: Maker) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM"))
    trainer = make(model=model, args={"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1})
    found = trained(trainer)
    from shardlite import ShardLite

    with mock.patch.object(ShardLite, "full_state_dict", None):  # the frozen base is not gathered
        trainer.save_model()
    torch.distributed.barrier()
    from safetensors.torch import load_file

    saved = load_file(os.path.join(trainer.args.output_dir, "adapter_model.safetensors"))
    assert not os.path.exists(os.path.join(trainer.args.output_dir, "model.safetensors"))
    return [found, saved]


def saved_model(make: Maker) -> Any:
    from transformers import AutoModelForCausalLM

    found = []
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        trainer = make(model=model)
        trainer.train()
        folder = os.path.join(trainer.args.output_dir, name)
        trainer.save_model(folder)
        torch.distributed.barrier()
        again = AutoModelForCausalLM.from_pretrained(folder)
        trained_weights = weights(trainer)
        assert_same({k: trained_weights[k] for k in again.state_dict()}, dict(again.state_dict()))
        found.append(trained_weights)
    return found


def optimizer_names(make: Maker) -> Any:
    found = {}
    for name in ("sgd", "adagrad", "rmsprop", "adamw_torch", "adamw_torch_fused", "adafactor"):
        found[name] = trained(make(args={"optim": name, "learning_rate": 1e-3, "weight_decay": 0.1}))
    return found


def optimizer_classes(make: Maker) -> Any:
    """An elementwise class, and one that steps whole parameters."""
    classes = [(torch.optim.NAdam, {"lr": 1e-3}), (torch.optim.Adafactor, {"lr": 1e-2})]
    return [trained(make(optimizer_cls_and_kwargs=each)) for each in classes]


def best_model(make: Maker) -> Any:
    more = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "learning_rate": 3.0,
    }
    trainer = make(args=more)
    found = trained(trainer)
    torch.distributed.barrier()
    kept = sorted(each for each in os.listdir(trainer.args.output_dir) if each.startswith("checkpoint"))
    return [found, os.path.basename(trainer.state.best_model_checkpoint), kept]


def best_model_of_weights(make: Maker) -> Any:
    more = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "save_only_model": True,
        "learning_rate": 3.0,
    }
    return trained(make(args=more))


def resumed(make: Maker) -> Any:
    more = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "max_steps": 5}
    trainer = make(model=gpt2, args=more)
    whole = trained(trainer)
    torch.distributed.barrier()
    again = make(model=lambda: gpt2().apply(lambda module: None), args=more)
    again.train(resume_from_checkpoint=os.path.join(trainer.args.output_dir, "checkpoint-2"))
    assert_same(whole[1], weights(again))
    again.train(resume_from_checkpoint=os.path.join(trainer.args.output_dir, "checkpoint-4"))
    assert_same(whole[1], weights(again))
    return whole


def smaller_batches(make: Maker) -> Any:
    model = llama()
    forward = model.forward

    def limited(*args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return forward(*args, **kwargs)

    model.forward = limited
    model.forward.__signature__ = __import__("inspect").signature(forward)
    trainer = make(model=model, args={"auto_find_batch_size": True, "per_device_train_batch_size": 8})
    trainer.train()
    return [weights(trainer), trainer._train_batch_size]


def parameter_of_loss(make: Maker) -> Any:
    """The optimizer also steps a parameter outside of the model, also into checkpoints."""
    from transformers import Trainer

    scale = torch.nn.Parameter(torch.ones(VOCABULARY))

    class Scaled(Trainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD([*self.model.parameters(), scale], lr=0.1)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Tensor:
            return (model(input_ids=inputs["input_ids"]).logits * scale).logsumexp(-1).mean()

    return [*trained(make(trainer=Scaled, args={"save_strategy": "steps", "save_steps": 2})), scale.detach()]


CASES = [
    parameter_of_loss,
    train_evaluate_predict,
    adamw,
    dropout,
    accumulation,
    own_tokens,
    checkpointing,
    reentrant,
    label_smoothing,
    neftune,
    evaluate_first,
    train_twice,
    train_from_init,
    generate_after,
    seq2seq,
    counts,
    given_optimizer,
    own_loss,
    loss_function,
    autocast,
    lora,
    saved_model,
    optimizer_names,
    optimizer_classes,
    best_model,
    best_model_of_weights,
    resumed,
    smaller_batches,
]


@pytest.mark.slow
@STAGES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_is_equal_to_ddp(cluster, tmp_path, stage, case):
    cluster.check(same_as_ddp, 2, tmp_path, stage, case)


def test_trains_evaluates_and_predicts_as_with_ddp(cluster, tmp_path):
    cluster.check(same_as_ddp, 2, tmp_path, 3, train_evaluate_predict)


# ---- where the arithmetic is not that of DDP ------------------------------------------------------------------------


def clipped(make: Maker) -> Any:
    trainer = make(args={"max_grad_norm": 0.3, "gradient_accumulation_steps": 2})
    trainer.train()
    return [weights(trainer), norms(trainer)]


def reduced_each_time(make: Maker) -> Any:
    """DDP adds a rank's gradient to the average of before, and averages again."""
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    trainer = make(args={"gradient_accumulation_steps": 2, "accelerator_config": config})
    trainer.train()
    return [weights(trainer), norms(trainer)]


def counted(make: Maker) -> Any:
    """Counts of tokens travel with the gradients, and the trainer gathers none. Evaluations come before and between."""
    more = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = make(args={"gradient_accumulation_steps": 2, "max_steps": 2, **more})
    trainer.model.eval()
    if hasattr(trainer, "sharding"):
        trainer.counts_items, read = True, trainer.get_batch_samples

        def read_without_gather(*args: Any) -> Any:
            with mock.patch.object(trainer.accelerator, "gather", None):
                return read(*args)

        trainer.get_batch_samples = read_without_gather
    trainer.train()
    return [weights(trainer), norms(trainer)]


def one_step(make: Maker) -> Any:
    trainer = make(args={"max_steps": 1})
    trainer.train()
    return [weights(trainer), norms(trainer)]


def in_bf16(make: Maker) -> Any:
    trainer = make(args={"bf16": True, "max_steps": 1})
    trainer.train()
    return [weights(trainer), norms(trainer)]


def in_fp16(make: Maker) -> Any:
    trainer = make(args={"fp16": True, "max_steps": 1})
    trainer.train()
    return [weights(trainer), norms(trainer)]


def close_to_ddp(group: Any, folder: Path, stage: int, case: Any, unit: float, *, on_gpu: bool = False) -> None:
    """Body of a rank. `unit` is the relative rounding of one operation on gradients; a step has about 100 of them."""
    (plain, plain_norms), (sharded, sharded_norms) = on_both(group, folder, stage, case, on_gpu=on_gpu)
    assert plain_norms == pytest.approx(sharded_norms, rel=100 * unit)
    start = llama().state_dict()
    for name, value in plain.items():
        moved = (value.cpu() - start[name]).abs().max()
        assert moved > 0, name
        torch.testing.assert_close(sharded[name], value, rtol=1e-6, atol=float(100 * unit * moved))


@pytest.mark.slow
@STAGES
@pytest.mark.parametrize(
    ("case", "unit", "ranks"),
    [
        (clipped, 2**-23, 2),
        (reduced_each_time, 2**-23, 2),
        (counted, 2**-23, 2),
        (counted, 2**-23, 3),
        (one_step, 2**-23, 3),
        (in_bf16, 2**-9, 2),
        (in_fp16, 2**-12, 2),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_is_close_to_ddp(cluster, tmp_path, stage, case, unit, ranks):
    cluster.check(close_to_ddp, ranks, tmp_path, stage, case, unit)


# ---- adapters -------------------------------------------------------------------------------------------------------


def adapter(kind: str) -> Any:
    """Return a small model with an adapter of PEFT."""
    import peft

    torch.manual_seed(5)
    task = {"task_type": "CAUSAL_LM"}
    layers = {"target_modules": ["q_proj", "v_proj"], "r": 2, **task}
    name, model = "default", gpt2() if kind == "bias" else llama()
    config = {
        "modules": lambda: peft.LoraConfig(modules_to_save=["embed_tokens", "lm_head"], **layers),
        "dora": lambda: peft.LoraConfig(use_dora=True, **layers),
        "named": lambda: peft.LoraConfig(**layers),
        "embedding": lambda: peft.LoraConfig(**layers | {"target_modules": ["embed_tokens", "q_proj"]}),
        "bias": lambda: peft.LoraConfig(bias="all", fan_in_fan_out=True, **layers | {"target_modules": ["c_attn"]}),
        "vera": lambda: peft.VeraConfig(**layers),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **task),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **task),
    }[kind]()
    return peft.get_peft_model(model, config, adapter_name="mine" if kind == "named" else name)


def adapted(make: Maker, kind: str) -> Any:
    """Save an adapter in each step, load the best one, and save it."""
    from safetensors.torch import load_file

    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    by_ddp = kind not in ("named", "prompt", "prefix")  # DDP cannot load these
    best = {"load_best_model_at_end": by_ddp, "save_only_model": True, "learning_rate": 1.0}
    trainer = make(model=adapter(kind), args=more | best)
    found = trained(trainer)
    trainer.save_model()
    torch.distributed.barrier()
    files = sorted(Path(trainer.args.output_dir).glob("**/adapter_model.safetensors"))
    assert len(files) == 4, files
    saved = [load_file(file) for file in files]
    if hasattr(trainer, "sharding"):
        before = Path(trainer.args.output_dir)
        trainer._load_from_checkpoint(str(before / "checkpoint-2"))
        trainer.save_model(str(before / "again"))
        torch.distributed.barrier()
        (again,) = (before / "again").glob("**/adapter_model.safetensors")
        relative = again.relative_to(before / "again")
        assert_same(load_file(before / "checkpoint-2" / relative), load_file(again))
    return [found, saved]


KINDS = ["modules", "dora", "named", "embedding", "bias", "vera", "prompt", "prefix"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_saved_and_loaded_as_with_ddp(cluster, tmp_path, kind):
    pytest.importorskip("peft", reason="needs peft")
    cluster.check(same_as_ddp, 2, tmp_path, 3, adapted, kind)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SIZES | shape))


def experts(make: Maker) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    given = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"], "r": 2}
    model = get_peft_model(mixtral(), LoraConfig(task_type="CAUSAL_LM", **given))
    return trained(make(model=model, args={"gradient_checkpointing": True, "learning_rate": 0.1}))


@pytest.mark.slow
def test_parameters_that_peft_adapts_are_recomputed(cluster, tmp_path):
    pytest.importorskip("peft", reason="needs peft")
    cluster.check(same_as_ddp, 2, tmp_path, 3, experts)


def keeps(group: Any, folder: Path, stage: int) -> None:
    """Body of a rank: what is kept computes in fp32, although the trainer's forward runs in autocast."""
    from shardlite import Precision
    from tests.support.trainers import maker

    seen, model = set(), llama()

    def note(name: str, linear: Any, args: Any, output: Tensor) -> None:
        seen.add(("down" in name, args[0].dtype, linear.weight.dtype, output.dtype))

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(partial(note, name))
    precision = Precision(compute=torch.bfloat16, keep="mlp.down_proj")
    with session(group, folder):
        trainer = maker(folder, stage)(model=model, args={"bf16": True}, sharding={"precision": precision})
        trainer.train()
    assert seen == {(True, *[torch.float32] * 3), (False, *[torch.bfloat16] * 3)}
    assert trainer.model_wrapped.kept_names == [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]


@STAGES
def test_a_trainer_in_bf16_keeps_modules_in_fp32(cluster, tmp_path, stage):
    cluster.check(keeps, 2, tmp_path, stage)


# ---- folders --------------------------------------------------------------------------------------------------------


def read_late(group: Any, folder: Path) -> None:
    """Body of a rank: a checkpoint of DDP is resumed with a model whose weights are read when it is wrapped."""
    from shardlite.integrations.pretrained import from_pretrained
    from tests.support.trainers import maker

    with session(group, folder):
        plain, sharded = maker(folder / "ddp", None), maker(folder / "sharded", 3)
        if group.rank() == 0:
            llama().save_pretrained(folder / "base")
        whole = plain(args=SAVING)
        whole.train()
        torch.distributed.barrier()

        def late() -> Any:
            return from_pretrained(type(whole.model), folder / "base", dtype=torch.float32)

        again = sharded(model=late, args=SAVING)
        again.train(resume_from_checkpoint=str(folder / "ddp" / "checkpoint-2"))
        assert_same(weights(whole), weights(again))
        before = sharded(model=late)
        before.save_model(str(folder / "saved"))  # nothing was trained
        assert_same(dict(llama().state_dict()), weights(before))
        torch.distributed.barrier()
        assert_same(dict(llama().state_dict()), dict(type(whole.model).from_pretrained(folder / "saved").state_dict()))


@pytest.mark.slow
def test_weights_of_a_checkpoint_replace_those_that_are_read_late(cluster, tmp_path):
    cluster.check(read_late, 2, tmp_path)


def used_again(group: Any, folder: Path) -> None:
    """Body of a rank: folders of earlier runs."""
    from shardlite.errors import LayoutError
    from tests.support.trainers import maker

    with session(group, folder):
        make = maker(folder, 3)
        make(args=SAVING).train()
        best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_only_model": True}
        second = make(args={**SAVING, **best, "learning_rate": 0.1})
        second.train()
        losses = [each["eval_loss"] for each in second.state.log_history if "eval_loss" in each]
        assert second.evaluate()["eval_loss"] == min(losses)
        third = make(args={**SAVING, "learning_rate": 0.01})
        third.train()
        end = third.evaluate()["eval_loss"]
        torch.distributed.barrier()
        loaded = make()
        loaded._load_from_checkpoint(str(folder / "checkpoint-4"))
        assert loaded.evaluate()["eval_loss"] == end
        if group.rank() == 0:
            (folder / "checkpoint-2" / "model.safetensors").unlink()  # to save space
            llama().save_pretrained(folder / "checkpoint-2" / "other")
            llama().save_pretrained(folder / "checkpoint-4")  # another run writes weights into the folder
        torch.distributed.barrier()
        resumed = make(args={**SAVING, "learning_rate": 0.01, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert resumed.evaluate()["eval_loss"] == end
        torch.distributed.barrier()
        with pytest.raises(LayoutError, match=r"has other weights than model\.safetensors beside it"):
            make(args=SAVING).train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        with pytest.raises(LayoutError, match=r"has other weights than model\.safetensors beside it"):
            third._load_from_checkpoint(str(folder / "checkpoint-4"))


@pytest.mark.slow
def test_weights_of_an_earlier_run_in_the_same_folder_are_not_loaded(cluster, tmp_path):
    cluster.check(used_again, 2, tmp_path)


def renamed(group: Any, folder: Path) -> None:
    """Body of a rank: `save_pretrained` writes each expert of Mixtral by itself."""
    from tests.support.trainers import maker

    with session(group, folder):
        make = maker(folder, 3)
        first = make(model=mixtral, args={**SAVING, "save_only_model": True})
        first.train()
        torch.distributed.barrier()
        second = make(model=lambda: mixtral().apply(torch.nn.Module.zero_grad), args={"learning_rate": 0.0})
        second._load_from_checkpoint(str(folder / "checkpoint-4"))
        second.evaluate()
        assert_same(weights(first), weights(second))


@pytest.mark.slow
def test_weights_that_transformers_renames_are_loaded(cluster, tmp_path):
    cluster.check(renamed, 2, tmp_path)


# ---- changes in the middle of a run ---------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "max_steps": 4, "learning_rate": 1e-3}


def change_of_trainer(group: Any, folder: Path, stage: int) -> None:
    """Body of a rank: begin with DDP, go on with ShardLite, and the other way round."""
    from tests.support.trainers import maker

    with session(group, folder):
        plain, sharded = maker(folder / "ddp", None), maker(folder / "sharded", stage)
        whole = plain(args=SAVING)
        whole.train()
        torch.distributed.barrier()
        second = sharded(args=SAVING)
        second.train(resume_from_checkpoint=str(folder / "ddp" / "checkpoint-2"))
        assert_same(weights(whole), weights(second))
        second.train(resume_from_checkpoint=str(folder / "ddp" / "checkpoint-2"))  # into shards
        assert_same(weights(whole), weights(second))
        refused = second.args.output_dir + "/checkpoint-4"
        with pytest.raises(ValueError, match="different number of parameter groups"):
            plain(args=SAVING).train(resume_from_checkpoint=refused)
        third = maker(folder / "back", stage)(args=SAVING)
        third.whole_optimizer_state = True
        third.train()
        torch.distributed.barrier()
        last = plain(args=SAVING)
        last.train(resume_from_checkpoint=str(folder / "back" / "checkpoint-2"))
        assert_same(weights(whole), weights(last))


@pytest.mark.slow
@STAGES
def test_a_run_changes_from_ddp_to_shardlite_and_back(cluster, tmp_path, stage):
    cluster.check(change_of_trainer, 2, tmp_path, stage)


def begun(group: Any, folder: Path) -> dict[str, Tensor]:
    from tests.support.trainers import maker

    with session(group, folder):
        trainer = maker(folder / "sharded", 3)(args=SAVING)
        trainer.train()
        return weights(trainer)


def ended(group: Any, folder: Path) -> dict[str, Tensor]:
    from tests.support.trainers import maker

    with session(group, folder):
        make, checkpoint = maker(folder / "other", 3), str(folder / "sharded" / "checkpoint-4")
        trainer = make(args=SAVING)
        trainer.train(resume_from_checkpoint=checkpoint)
        further = make(args={**SAVING, "max_steps": 6})
        further.train(resume_from_checkpoint=checkpoint)
        assert further.state.global_step == 6
        assert any(not torch.equal(value, weights(trainer)[name]) for name, value in weights(further).items())
        return weights(trainer)


@pytest.mark.slow
def test_a_checkpoint_loads_at_another_number_of_ranks(cluster, tmp_path):
    before, after = cluster.run(begun, 2, tmp_path)[0], cluster.run(ended, 3, tmp_path)[0]
    assert_same(before, after)  # the run was complete, so nothing was trained


# ---- what is refused ------------------------------------------------------------------------------------------------


def by_launcher(trainer: Any) -> None:
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = True, False


def refusals(group: Any, folder: Path) -> None:
    """Body of a rank."""
    from transformers import Adafactor, Trainer
    from transformers.training_args import OptimizerNames

    from shardlite.errors import LayoutError
    from shardlite.integrations.transformers import OPTIMIZERS, ShardLiteTrainer
    from tests.support.trainers import maker

    with session(group, folder):
        make = maker(folder, 3)
        with pytest.raises(TypeError, match=r"unknown options \['stages'\]"):
            make(sharding={"stages": 3})
        for name in ("fsdp", "deepspeed", "parallelism_config"):
            trainer_args = make().args
            setattr(trainer_args, name, "given")
            with pytest.raises(ValueError, match=f"{name} would shard the model too"):
                ShardLiteTrainer(model=llama(), args=trainer_args)
        several = make().args
        several._n_gpu = 2
        with pytest.raises(ValueError, match="one process uses 2 GPUs"):
            ShardLiteTrainer(model=llama(), args=several)
        with (
            mock.patch.object(Trainer, "create_accelerator_and_postprocess", by_launcher),
            pytest.raises(ValueError, match="the launcher enables FSDP"),
        ):
            make()
        first = make()
        first.train()
        with pytest.raises(ValueError, match="sharded by an earlier trainer"):
            make(model=first.model).train()
        make(model=first.model_wrapped.unwrap()).train()
        each = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
        counting = make(args={"gradient_accumulation_steps": 2, **each})
        counting.counts_items = True
        with pytest.raises(ValueError, match="sync_each_batch=True reduces each batch"):
            counting.train()
        for name in [each for each in OptimizerNames if each.value not in OPTIMIZERS]:
            trainer = make()
            trainer.args.optim = name
            with pytest.raises(ValueError, match=f"optim='{name.value}' was not tried"):
                trainer.train()
        own = [torch.distributed.new_group([rank]) for rank in range(group.size())][group.rank()]
        with pytest.raises(ValueError, match="group has 1 of 2 ranks"):
            make(sharding={"group": own}).train()
        other = torch.optim.SGD(llama().parameters(), lr=0.1)
        with pytest.raises(LayoutError, match="SGD holds no parameter of the trainer's model"):
            make(optimizers=(other, None)).train()
        for name in ("bf16_full_eval", "fp16_full_eval"):
            with pytest.raises(ValueError, match=f"{name}=True would convert"):
                make(args={name: True}).train()
        model = llama()
        pair = (Adafactor(model.parameters(), scale_parameter=False, relative_step=False, lr=0.1), None)
        with pytest.raises(LayoutError, match=r"pass optimizer_cls_and_kwargs=\(Adafactor"):
            make(model=model, optimizers=pair).train()


def test_trainer_has_the_methods_that_the_mixin_overrides():
    from transformers import Trainer

    from shardlite.integrations.transformers import HOOKS, ShardLiteMixin

    own = {"_shards", "_sharded_model", "_before_backward", "_hand_shards", "_summon_full_params", "_load_weights"}
    methods = {name for name, value in vars(ShardLiteMixin).items() if callable(value) or isinstance(value, property)}
    overridden = {name for name in methods - own if not name.startswith("__")}
    assert overridden <= {*HOOKS, "train"}
    assert all(hasattr(Trainer, name) for name in HOOKS)


def prints_a_weight(group: Any, folder: str) -> None:
    """Body of a rank."""
    from transformers import TrainerCallback

    from tests.support.trainers import maker

    class Prints(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.is_world_process_zero:
                print(model.model.layers[0].mlp.up_proj.weight.sum())

    with session(group, Path(folder)):
        maker(Path(folder), 3)(callbacks=[Prints()]).train()


@pytest.mark.slow
def test_a_callback_that_reads_a_weight_on_rank_0_ends_in_an_error(doomed, tmp_path):
    (tmp_path / "run").mkdir()
    ended = doomed.run(prints_a_weight, 2, str(tmp_path / "run"), directory=tmp_path)
    assert all(each.kind for each in ended), ended
    assert "up_proj.weight" in ended[0].text


def saves_on_rank_0(group: Any, folder: str) -> None:
    """Body of a rank."""
    from transformers import TrainerCallback

    from tests.support.trainers import maker

    class Saves(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                trainer.save_model(folder)

    with session(group, Path(folder)):
        trainer = maker(Path(folder), 3)(callbacks=[Saves()])
        trainer.train()


@pytest.mark.slow
def test_the_error_names_the_line_of_a_callback(doomed, tmp_path):
    """It is the line of the program on the rank that has called, not one of the trainer."""
    (tmp_path / "run").mkdir()
    ended = doomed.run(saves_on_rank_0, 2, str(tmp_path / "run"), directory=tmp_path)
    lines, first = inspect.getsourcelines(saves_on_rank_0)
    line = first + next(index for index, text in enumerate(lines) if "save_model" in text)
    assert f"called in {__file__}, line {line}\n" in ended[0].text, ended


@pytest.mark.slow
def test_what_a_sharded_model_cannot_do_is_refused_by_name(cluster, tmp_path):
    cluster.check(refusals, 2, tmp_path)


def full_evaluation(make: Maker) -> Any:
    return make(args={"bf16_full_eval": True}).evaluate()["eval_loss"]


@pytest.mark.slow
def test_a_trainer_that_only_evaluates_converts_the_model(cluster, tmp_path):
    cluster.check(same_as_ddp, 2, tmp_path, 3, full_evaluation)


def compiled(make: Maker) -> Any:
    trainer = make(args={"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2})
    return trained(trainer)


@pytest.mark.slow
@STAGES
def test_compiled_models_are_equal_to_ddp(cluster, tmp_path, stage):
    cluster.check(same_as_ddp, 2, tmp_path, stage, compiled)


def hybrid(make: Maker) -> Any:
    mesh = None
    if make(args={"max_steps": 1}).args.world_size == 4:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2))
    trainer = make(args={"max_steps": 1}, sharding={"group": mesh})
    trainer.train()
    return [weights(trainer), norms(trainer)]


@pytest.mark.slow
def test_hybrid_sharding_is_close_to_ddp(cluster, tmp_path):
    cluster.check(close_to_ddp, 4, tmp_path, 3, hybrid, 2**-23)


def alone(group: Any, folder: Path) -> int:
    from tests.support.trainers import maker

    with session(group, folder):
        trainer = maker(folder, 3)()
        trainer.train()
        return int(trainer.model_wrapped.module.num_parameters())


@pytest.mark.slow
def test_one_rank_trains(cluster, tmp_path):
    assert cluster.run(alone, 1, tmp_path) == [llama().num_parameters()]


@pytest.mark.slow
def test_the_example_runs(cluster, tmp_path):
    given = ["--output_dir", "out", "--use_cpu", "--save_steps", 1, "--per_device_train_batch_size", 2]
    run_script(cluster, EXAMPLE, *given, "--max_steps", 1, folder=tmp_path, warnings="ignore")
    begun = str(tmp_path / "out" / "checkpoint-1")
    more = ["--max_steps", 2, "--resume_from_checkpoint", begun]
    run_script(cluster, EXAMPLE, *given, *more, folder=tmp_path, warnings="ignore")
    assert (tmp_path / "out" / "checkpoint-2" / "shardlite").exists()
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_only_finished_checkpoints_are_resumed(tmp_path):
    from shardlite.errors import ShardWarning
    from shardlite.integrations.transformers import _last_finished

    for step, text in ((2, "{}"), (10, "{}"), (30, '{"epo')):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-40").mkdir()
    with pytest.warns(ShardWarning, match="checkpoint-[34]0 is passed over: its save has not ended"):
        assert _last_finished(tmp_path) == str(tmp_path / "checkpoint-10")


INTERRUPTED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "optim": "adamw_torch", "logging_steps": 1}


def killed(group: Any, folder: str) -> None:
    """Body of a rank: it is killed when the shards of step 4 are written, but not published."""
    from shardlite.checkpoint.peers import Peers
    from tests.support.trainers import maker

    agree = Peers.agree

    def die(peers: Peers, act: Any, what: str) -> Any:
        if what == "save" and Path(folder, "checkpoint-4").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return agree(peers, act, what)

    with session(group, Path(folder)), mock.patch.object(Peers, "agree", die):
        maker(Path(folder), 3)(args=INTERRUPTED).train()


def goes_on(group: Any, folder: Path, stage: int) -> None:
    """Body of a rank: resume the run that was killed."""
    from shardlite.errors import ShardWarning
    from tests.support.trainers import maker

    with session(group, folder):
        straight = maker(folder / "straight", stage)(args=INTERRUPTED)
        straight.train()
        again = maker(folder / "killed", stage)(args=INTERRUPTED)
        with pytest.warns(ShardWarning, match="checkpoint-4 is passed over: its save has not ended"):
            again.train(resume_from_checkpoint=True)
        losses = [[each["loss"] for each in one.state.log_history if "loss" in each] for one in (straight, again)]
        assert len(losses[0]) == 6
        assert losses[0] == losses[1]
        assert_same(weights(straight), weights(again))


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_saved_is_resumed(cluster, doomed, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    for ended in doomed.run(killed, 2, str(folder), directory=tmp_path):
        assert ended.status == -signal.SIGKILL, ended
    (unpublished,) = (folder / "checkpoint-4" / "shardlite").glob(".saving-*")
    assert len(list(unpublished.glob("*.distcp"))) == 2
    assert (folder / "checkpoint-4" / "model.safetensors").exists()
    assert not (folder / "checkpoint-4" / "trainer_state.json").exists()
    cluster.check(goes_on, 2, tmp_path, 3)
    assert (folder / "checkpoint-4" / "trainer_state.json").exists()
