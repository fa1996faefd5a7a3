"""Adapters of PEFT streamed to a file, and replicated routers of a mixture of experts, in models of transformers."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlite import AdamW, ShardLite
from tests.support.twins.sharded import same_bits, same_states

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))


def quiet(make: Callable[[], Any]) -> Any:
    """Call `make` without the warnings about old names in transformers that peft uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make()


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(rank))


def train(model: ShardLite, steps: int = 2) -> None:
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(steps):
        ids = tokens(10 * step + dist.get_rank())
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_adapters_are_streamed_to_a_file_that_peft_loads(group: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = ShardLite(quiet(lambda: peft.get_peft_model(llama(), config)), group=group)
    train(model)
    adapters = dict(model.full_parameters(trainable=True))
    assert len(adapters) == 2 * 2 * 2  # blocks, layers and factors
    folder = tmp_path / str(dist.get_rank())
    config.save_pretrained(folder)
    saved = {name.replace(".default.", "."): tensor for name, tensor in adapters.items()}  # the name of the adapter
    safetensors.save_file(saved, folder / "adapter_model.safetensors")
    loaded = quiet(lambda: peft.PeftModel.from_pretrained(llama(), folder))
    same_states("all weights", dict(loaded.state_dict()), model.full_state_dict())
    with torch.no_grad():
        same_bits("logits", model(tokens(0)).logits, loaded(tokens(0)).logits)


def test_weights_are_streamed_into_a_fresh_copy(group: Any) -> None:
    model = ShardLite(llama(), group=group)
    train(model)
    fresh = llama().to(torch.bfloat16)
    fresh.load_state_dict(dict(model.full_parameters(dtype=torch.bfloat16, max_bytes=40_000)))
    expected = {name: value.to(torch.bfloat16) for name, value in model.full_state_dict().items()}
    same_states("in bf16", dict(fresh.state_dict()), expected)


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def test_replicated_routers_have_the_bits_of_sharded_ones(group: Any) -> None:
    states = []
    for replicates in (True, False):
        module = mixtral()
        routers = [layer.mlp.gate for layer in module.model.layers]
        model = ShardLite(module, group=group, replicate=routers if replicates else ())
        train(model)
        states.append(model.full_state_dict())
        if replicates:
            assert all(isinstance(router, nn.Module) for router in routers)
            for name, param in routers[0].named_parameters():  # readable at any time, on one rank alone
                same_bits(name, param.detach(), states[0][f"model.layers.0.mlp.gate.{name}"])
    same_states("weights", *states)
