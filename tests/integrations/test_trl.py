"""Trainers of TRL with ShardLite: equal to the bit to the same program with DDP."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainers import SIZES, Maker, history, on_both, weights

pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("datasets", reason="needs datasets")

STAGES = pytest.mark.parametrize("stage", [3, 2])

WORDS = ["red", "blue", "one", "two", "cat", "dog", "sun", "sea", "up", "down"]


def tokenizer() -> Any:
    """Return a tokenizer of words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: index for index, word in enumerate([*special.values(), *WORDS])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, **special)


def text(start: int, count: int) -> str:
    return " ".join(WORDS[(start * start + 3 * place) % len(WORDS)] for place in range(count))


def model(**settings: Any) -> Any:
    """Return a small Llama with the tokenizer's tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {**SIZES, "vocab_size": 14, "max_position_embeddings": 64, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**tokens | shape | settings))


def dataset(*columns: str) -> Any:
    from datasets import Dataset

    lengths = {"text": 9, "prompt": 3, "chosen": 5, "rejected": 4}
    return Dataset.from_dict(
        {name: [text(row + place, lengths[name]) for row in range(40)] for place, name in enumerate(columns)}
    )


def given(*columns: str) -> dict[str, Any]:
    return {
        "model": model,
        "processing_class": tokenizer(),
        "train_dataset": dataset(*columns),
        "eval_dataset": dataset(*columns).select(range(9)),
    }


def trained(trainer: Any) -> list[Any]:
    trainer.train()
    logged = [{k: v for k, v in each.items() if "time" not in k} for each in history(trainer)]
    return [logged, weights(trainer)]


SHORT = {"bf16": False, "max_steps": 3, "gradient_checkpointing": False}


def sft(make: Maker) -> Any:
    from trl import SFTConfig, SFTTrainer

    trainer = make(SFTTrainer, SFTConfig, args={**SHORT, "gradient_accumulation_steps": 2}, **given("text"))
    return [trained(trainer), trainer.evaluate()["eval_loss"]]


def sft_by_default(make: Maker) -> Any:
    """SFT with the defaults of its arguments: activation checkpointing, and the loss in chunks if it is the default."""
    from trl import SFTConfig, SFTTrainer

    return trained(make(SFTTrainer, SFTConfig, args={"bf16": False, "max_steps": 3}, **given("text")))


def sft_chunked(make: Maker) -> Any:
    from trl import SFTConfig, SFTTrainer

    return trained(make(SFTTrainer, SFTConfig, args={**SHORT, "loss_type": "chunked_nll"}, **given("text")))


def sft_lora(make: Maker) -> Any:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    peft = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM")
    return trained(make(SFTTrainer, SFTConfig, args=SHORT, peft_config=peft, **given("text")))


def dpo(make: Maker) -> Any:
    from trl import DPOConfig, DPOTrainer

    columns = given("prompt", "chosen", "rejected")
    trainer = make(DPOTrainer, DPOConfig, args=SHORT, ref_model=model(), **columns)
    return [trained(trainer), trainer.evaluate()["eval_loss"]]


def dpo_synced(make: Maker) -> Any:
    from trl import DPOConfig, DPOTrainer

    more = {**SHORT, "sync_ref_model": True, "ref_model_sync_steps": 2, "learning_rate": 0.3, "max_steps": 4}
    trainer = make(DPOTrainer, DPOConfig, args=more, ref_model=model(), **given("prompt", "chosen", "rejected"))
    return [trained(trainer), {k: v.clone() for k, v in trainer.ref_model.state_dict().items()}]


def dpo_precomputed(make: Maker) -> Any:
    from accelerate import PartialState
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer

    more = {**SHORT, "precompute_ref_log_probs": True}
    columns = given("prompt", "chosen", "rejected")
    for name in ("train_dataset", "eval_dataset"):  # TRL needs files that all ranks see
        with PartialState(cpu=True).main_process_first():
            if not os.path.exists(name):
                columns[name].save_to_disk(name)
        columns[name] = load_from_disk(name)
    return trained(make(DPOTrainer, DPOConfig, args=more, ref_model=model(), **columns))


def dpo_lora(make: Maker) -> Any:
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    peft = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM")
    columns = given("prompt", "chosen", "rejected")
    return trained(make(DPOTrainer, DPOConfig, args=SHORT, peft_config=peft, **columns))


def reward(make: Maker) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(3)
    config = model().config.to_dict() | {"num_labels": 1}
    config.pop("architectures", None)
    scorer = LlamaForSequenceClassification(LlamaConfig(**config))
    columns = given("chosen", "rejected") | {"model": scorer}
    return trained(make(RewardTrainer, RewardConfig, args=SHORT, **columns))


def prefers_red(completions: list[str], **_: Any) -> list[float]:
    return [completion.count("red") + len(completion) / 100 for completion in completions]


def grpo(make: Maker) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    more = {**SHORT, "num_generations": 4, "max_completion_length": 6}
    return trained(make(GRPOTrainer, GRPOConfig, args=more, reward_funcs=prefers_red, **given("prompt")))


def grpo_synced(make: Maker) -> Any:
    """GRPO with a reference model that follows, and weights that are gathered unit by unit while it generates."""
    from accelerate import PartialState
    from trl import GRPOConfig, GRPOTrainer

    more = {**SHORT, "num_generations": 4, "max_completion_length": 6, "beta": 0.1, "learning_rate": 0.3}
    more |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "ds3_gather_for_generation": False}
    begun = model()
    begun.config._name_or_path = os.path.abspath("begun")  # TRL loads the reference from there
    with PartialState(cpu=True).main_process_first():
        if not os.path.exists("begun"):
            begun.save_pretrained("begun")
    trainer = make(GRPOTrainer, GRPOConfig, args=more, reward_funcs=prefers_red, **given("prompt") | {"model": begun})
    return [trained(trainer), {name: value.clone() for name, value in trainer.ref_model.state_dict().items()}]


def same_as_ddp(group: Any, folder: Path, stage: int, case: Any) -> None:
    """Body of a rank: run a case with both and compare what it returns."""
    from tests.integrations.test_transformers import assert_same

    plain, sharded = on_both(group, folder, stage, case)
    assert_same(plain, sharded)


CASES = [
    sft,
    sft_by_default,
    sft_chunked,
    sft_lora,
    dpo,
    dpo_synced,
    dpo_precomputed,
    dpo_lora,
    reward,
    grpo,
    grpo_synced,
]


@pytest.mark.slow
@STAGES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_is_equal_to_ddp(cluster, tmp_path, stage, case):
    cluster.check(same_as_ddp, 2, tmp_path, stage, case)


def test_sft_is_equal_to_ddp(cluster, tmp_path):
    cluster.check(same_as_ddp, 2, tmp_path, 3, sft)


@pytest.mark.slow
def test_the_script_of_sft_runs_with_two_changed_lines(cluster, tmp_path):
    """TRL's own program, with the change that the page lists."""
    import json
    import re

    from trl.scripts import sft as program

    from tests.support.ranks.scripts import run_script

    source = Path(program.__file__).read_text()
    line = "    trainer = SFTTrainer(\n"
    assert source.count(line) == 1
    begin = "    from shardlite.integrations.transformers import ShardLiteMixin\n"
    changed = source.replace(line, begin + "    trainer = type('Sharded', (ShardLiteMixin, SFTTrainer), {})(\n")
    script = tmp_path / "sft.py"
    script.write_text(changed)
    model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": text(row, 9)}) for row in range(40)]
    (tmp_path / "data" / "train.json").write_text("\n".join(rows))
    given = ["--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out", "--use_cpu"]
    more = ["--max_steps", "2", "--bf16", "False", "--report_to", "none", "--save_steps", "1"]
    run_script(cluster, script, *given, *more, folder=tmp_path, warnings="ignore")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert re.search("shardlite", " ".join(each.name for each in (tmp_path / "out" / "checkpoint-2").iterdir()))
