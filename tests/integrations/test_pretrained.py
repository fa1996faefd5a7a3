"""Weights of `save_pretrained` are read shard by shard, and are those of `from_pretrained`."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlite import CheckpointError, LayoutError, ShardLite
from shardlite.integrations import pretrained
from shardlite.integrations.pretrained import Unread, from_pretrained
from tests.support.models.hf import ARCHITECTURES, BLOCK, TOKENS, case
from tests.support.twins.sharded import Turn, same_bits, same_states, slow

pytest.importorskip("transformers", reason="needs the package transformers")

NAMES = ["gpt2", "llama", "llama-tied", "bert", "t5", "mixtral"]


def qwen2() -> nn.Module:
    """The second layer attends to a sliding window; the head is tied to the embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    heads = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**TOKENS | BLOCK | windows | heads))


def saved(make: Callable[[], nn.Module], folder: Path, group: Any, *, size: str = "4KB", **options: Any) -> type:
    """Save a model on the group's first rank, in files of at most `size`. Return its class."""
    torch.manual_seed(3)
    model = make().to(**options)
    if dist.get_rank(group) == 0:
        model.save_pretrained(folder, max_shard_size=size)
    dist.barrier(group)
    return type(model)


@contextmanager
def reads() -> Iterator[list[int]]:
    """Collect the number of bytes of each read of a file."""
    found: list[int] = []
    original = pretrained.read_file

    def read(path: Path, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        found.append(numel * dtype.itemsize)
        return original(path, offset, numel, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "read_file", read)
        yield found


def own_copy(folder: Path, group: Any) -> Path:
    """Copy a folder for this rank alone."""
    mine = folder.with_name(f"{folder.name}-{dist.get_rank(group)}")
    shutil.copytree(folder, mine)
    return mine


class Largest(TorchDispatchMode):
    """Records the bytes of the largest memory that a function returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and not isinstance(each, Unread) and not each.is_meta:
                self.nbytes = max(self.nbytes, each.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize(
    ("name", "stage", "group"),
    [
        case("mixtral", 3, 3),
        *(slow(name, stage, size) for name in [*NAMES, "qwen2"] for stage in (3, 2) for size in (2, 3)),
    ],
    indirect=["group"],
)
def test_a_model_has_the_bits_of_one_that_was_read_whole(group: Any, name: str, stage: int, tmp_path: Path) -> None:
    """Weights and buffers, from several files in bf16, and it computes with them."""
    architecture = ARCHITECTURES[name if name in ARCHITECTURES else "llama"]
    model_class = saved(qwen2 if name == "qwen2" else architecture.make, tmp_path, group, dtype=torch.bfloat16)
    plain, expected = model_class.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    with reads() as sizes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "PIECE", 50)
        model, found = from_pretrained(
            model_class, tmp_path, group=group, dtype=torch.float32, output_loading_info=True
        )
        assert found == expected
        assert all(param.is_meta for param in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())
        del sizes[:]  # of buffers
        model = ShardLite(model, stage=stage, group=group)
    kept = sum(param.numel() for param in model.parameters())
    assert kept < sum(param.numel() for param in plain.parameters())
    assert sum(sizes) == 2 * kept  # this rank's elements, each of them once
    assert max(sizes) <= 2 * 50
    state = dict(plain.named_parameters()) | dict(plain.named_buffers())
    own = {name: value for name, value in model.full_state_dict().items() if name in state}
    same_states("state", own | dict(model.named_buffers()), state)
    assert model.module.training is plain.training is False
    turn = Turn(0, dist.get_rank(group), 0)
    same_bits("loss", architecture.loss(model, turn).detach(), architecture.loss(plain, turn).detach())


def test_no_rank_has_more_memory_than_its_shards(group, tmp_path):
    model_class = saved(ARCHITECTURES["llama"].make, tmp_path, group)
    model = from_pretrained(model_class, tmp_path, group=group)
    with Largest() as largest:
        model = ShardLite(model, group=group)
    arena = max(param.untyped_storage().nbytes() for param in model.parameters())
    assert largest.nbytes == arena


def test_what_the_files_lack_is_initialized_on_the_first_rank(group, tmp_path):
    """A new head has its values on all ranks; a base model's names get their prefix."""
    from transformers import LlamaForSequenceClassification

    saved(lambda: ARCHITECTURES["llama"].make().model, tmp_path, group)
    torch.manual_seed(dist.get_rank(group))
    model, info = from_pretrained(
        LlamaForSequenceClassification, tmp_path, group=group, output_loading_info=True, num_labels=3
    )
    assert info["missing_keys"] == {"score.weight"}
    (head,) = [param for param in model.parameters() if not param.is_meta]
    drawn = head.detach().clone()
    dist.broadcast(drawn, dist.get_global_rank(group, 0), group)
    model = ShardLite(model, group=group)
    same_bits("score.weight", model.full_state_dict()["score.weight"], drawn)
    base = type(ARCHITECTURES["llama"].make().model).from_pretrained(tmp_path)
    same_bits("embedding", model.full_state_dict()["model.embed_tokens.weight"], base.embed_tokens.weight.detach())


def test_a_converted_model_has_its_rounded_values(group, tmp_path):
    """`model.to(dtype)` before the model is wrapped is what it is with values."""
    model_class = saved(ARCHITECTURES["gpt2"].make, tmp_path, group)
    model = ShardLite(from_pretrained(model_class, tmp_path, group=group).to(torch.bfloat16), group=group)
    for name, value in model_class.from_pretrained(tmp_path).state_dict().items():
        same_bits(name, model.full_state_dict()[name], value.bfloat16().float())


def damaged(folder: Path) -> None:
    """Cut a file."""
    files = sorted(folder.glob("*.safetensors"))
    files[-1].write_bytes(files[-1].read_bytes()[:-100])


def missing(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def other(folder: Path) -> None:
    """Another model under the same names."""
    index = folder / "config.json"
    config = json.loads(index.read_text())
    index.write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 1}))


@pytest.mark.parametrize("harm", [damaged, missing, other])
def test_each_rank_is_told_of_a_file_that_one_rank_cannot_read(group, harm, tmp_path):
    rank = dist.get_rank(group)
    model_class = saved(ARCHITECTURES["llama"].make, tmp_path, group)
    folder = own_copy(tmp_path, group)
    if rank == 1:
        harm(folder)
    with pytest.raises(LayoutError if rank == 0 else Exception, match="rank 1: " if rank == 0 else ".") as caught:
        from_pretrained(model_class, folder, group=group)
    assert (caught.type is LayoutError) is (rank == 0)


def test_ranks_with_different_files_are_told(group, tmp_path):
    saved(ARCHITECTURES["llama"].make, tmp_path / "0", group)
    model_class = saved(ARCHITECTURES["llama"].make, tmp_path / "1", group, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="files"):
        from_pretrained(model_class, tmp_path / str(dist.get_rank(group)), group=group)


def test_a_file_that_becomes_shorter_is_told_to_all(group, tmp_path):
    model_class = saved(ARCHITECTURES["llama"].make, tmp_path, group, size="1GB")
    folder = own_copy(tmp_path, group)
    model = from_pretrained(model_class, folder, group=group)
    if dist.get_rank(group) == 1:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:4000])
    with pytest.raises(LayoutError, match=r"cannot be read: .*is shorter than when it was opened"):
        ShardLite(model, group=group)


def test_one_rank_that_reads_it_whole_is_told(group, tmp_path):
    model_class = saved(ARCHITECTURES["gpt2"].make, tmp_path, group)
    lazily = from_pretrained(model_class, tmp_path, group=group)
    model = model_class.from_pretrained(tmp_path) if dist.get_rank(group) else lazily
    with pytest.raises(LayoutError, match="read from a file"):
        ShardLite(model, group=group)


def test_what_has_lost_its_values_is_named(group, tmp_path):
    model_class = saved(ARCHITECTURES["gpt2"].make, tmp_path, group)
    model = from_pretrained(model_class, tmp_path, group=group)
    model.transformer.h[1].ln_1.weight = nn.Parameter(torch.empty(12, device="meta"))
    with pytest.raises(LayoutError, match=r"h.1.ln_1.weight' is on the meta device, and unlike other parameters"):
        ShardLite(model, group=group)


@pytest.mark.slow
def test_adapters_on_top_are_initialized(group, tmp_path):
    """They are on the meta device as their base layers are; `init=` of the page of checkpoints."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    model_class = saved(ARCHITECTURES["llama"].make, tmp_path, group)
    model = from_pretrained(model_class, tmp_path, group=group)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # among these packages
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    zeros = {module for name, module in model.named_modules() if ".lora_B." in name}

    def init(module: nn.Module) -> None:
        if module in zeros:
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()

    model = ShardLite(model, init=init, group=group)
    plain = model_class.from_pretrained(tmp_path)
    for name, value in model.full_state_dict().items():
        if "lora" in name:
            assert bool(value.any()) is ("lora_A" in name)
        else:
            own = name.removeprefix("base_model.model.").replace(".base_layer", "")
            same_bits(name, value, plain.get_parameter(own).detach())


@pytest.mark.slow
def test_values_that_are_loaded_into_an_adapter_are_kept(group, tmp_path):
    """With a module that PEFT trains, which is a copy of one that is read when the model is wrapped."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    model_class = saved(ARCHITECTURES["llama"].make, tmp_path / "base", group)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):  # among these packages
        torch.manual_seed(5)
        plain = peft.get_peft_model(model_class.from_pretrained(tmp_path / "base"), config)
        if dist.get_rank(group) == 0:
            plain.save_pretrained(tmp_path / "adapter")
        dist.barrier(group)
        late = from_pretrained(model_class, tmp_path / "base", group=group)
        model = ShardLite(peft.PeftModel.from_pretrained(late, tmp_path / "adapter"), group=group)
        fresh = peft.get_peft_model(from_pretrained(model_class, tmp_path / "base", group=group), config)
    same_states("state", model.full_state_dict(), plain.state_dict())

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    state = ShardLite(fresh, init=init, group=group).full_state_dict()
    head = plain.base_model.model.lm_head.original_module.weight.detach()
    same_bits("copy", state["base_model.model.lm_head.modules_to_save.default.weight"], head)
    assert all(bool((value == 1).all()) for name, value in state.items() if "lora" in name)


def test_a_model_with_computed_weights_is_read(group, tmp_path):
    """Transformers initializes the weight that weight_norm computes, in vain."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    layers = {"num_feat_extract_layers": 1, "conv_dim": (8,), "conv_stride": (2,), "conv_kernel": (3,)}
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    groups = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    saved(lambda: Wav2Vec2Model(Wav2Vec2Config(**layers, **shape, **groups)), tmp_path, group)
    model = ShardLite(from_pretrained(Wav2Vec2Model, tmp_path, group=group), group=group)
    same_states("state", model.full_state_dict(), Wav2Vec2Model.from_pretrained(tmp_path).state_dict())


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"state_dict": {}}, {"disable_mmap": True}])
def test_options_that_would_read_all_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        from_pretrained(None, tmp_path, **options)


def test_other_files_are_refused(tmp_path):
    model = ARCHITECTURES["gpt2"].make()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        from_pretrained(type(model), tmp_path)


def lazily(tensor: Tensor) -> Unread:
    return Unread(tensor.to("meta"), lambda start, stop: tensor.reshape(-1)[start:stop])


JOINS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "stack": (lambda a, b: torch.stack([a, b]), True),
    "stack at 1": (lambda a, b: torch.stack([a, b], dim=1), True),
    "stack at the end": (lambda a, b: torch.stack([a, b], dim=-1), True),
    "cat": (lambda a, b: torch.cat([a, b]), True),
    "cat at 1": (lambda a, b: torch.cat([a, b], dim=1), True),
    "experts": (lambda a, b: torch.cat([torch.stack([a, a + 0]), torch.stack([b, b])], dim=1), False),
    "view": (lambda a, b: a.to(torch.bfloat16).view(2, 6)[None].detach(), True),
    "transposed": (lambda a, b: a.t().contiguous(), False),
    "chunk": (lambda a, b: b.chunk(2, dim=1)[1], False),
    "mixed": (lambda a, b: torch.cat([a, torch.ones(1, 4)]), True),
}


@pytest.mark.parametrize("name", JOINS)
def test_each_range_of_what_was_computed_is_right(name):
    function, ranged = JOINS[name]
    a, b = torch.arange(12.0).view(3, 4), 100 + torch.arange(12.0).view(3, 4)
    expected, found = function(a, b), function(lazily(a), lazily(b))
    assert (found.shape, found.dtype, found.ranged) == (expected.shape, expected.dtype, ranged)
    flat = expected.reshape(-1)
    for start in range(flat.numel()):
        for stop in range(start + 1, flat.numel() + 1):
            same_bits(name, torch.cat(list(found.pieces(start, stop))), flat[start:stop])


def test_weights_that_were_not_read_are_not_written():
    unread = lazily(torch.zeros(3))
    with pytest.raises(CheckpointError, match="would write to weights that have not been read"):
        unread.zero_()
    assert torch.equal(unread, lazily(torch.zeros(3)))
    computed = unread + 1
    with pytest.raises(CheckpointError, match="would write to weights that have not been read"):
        computed.view(-1).zero_()
    assert torch.equal(computed.whole(), torch.ones(3))
    computed.zero_()
    with pytest.raises(CheckpointError, match="and then overwritten"):
        computed.whole()
