"""Exchange checkpoints with FSDP2 and unsharded programs through plain `torch.distributed.checkpoint`."""

import io
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardlite import AdamW, CheckpointError, LayoutError, ShardLite, load, save
from shardlite.checkpoint import SafeLoadPlanner, SafeReader, export_weights
from shardlite.checkpoint.reading import small_tensor
from shardlite.cli import main
from tests.support.checkpoints import same_state
from tests.support.internals import bridge
from tests.support.twins.sharded import same_bits, take_step


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Sequential(nn.Linear(10, 10), nn.Tanh()), nn.LayerNorm(10))


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        take_step(optimizer, model(x).square().mean())


def ours(group: Any, seed: int = 0, **options: Any) -> tuple[ShardLite, AdamW]:
    model = ShardLite(net(seed), group=group, units=nn.Linear, **options)
    return model, AdamW(model.parameters(), lr=0.01)


def theirs(seed: int = 0) -> tuple[nn.Module, optim.AdamW]:
    model = net(seed)
    fully_shard(model[1])
    fully_shard(model)
    return model, optim.AdamW(model.parameters(), lr=0.01)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same_run(group: Any, model: ShardLite, optimizer: AdamW, other: nn.Module, its: optim.Optimizer) -> None:
    """Compare with a model whose parameters are DTensors or plain, names and moments."""
    expected = {name: whole(value.detach()) for name, value in other.named_parameters()}
    same_state(model.full_state_dict(), expected)
    shards = dict(model.named_parameters())
    parts = bridge(model).shards.parts()
    for name, param in other.named_parameters():
        _, start, stop, _ = parts[shards[name]]
        assert float(optimizer.state[shards[name]]["step"]) == float(its.state[param]["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            mine, full = optimizer.state[shards[name]][key], whole(its.state[param][key])
            same_bits(f"{name}.{key}", mine.reshape(-1), full.reshape(-1)[start:stop])


def quietly(call: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP, on itself
        return call(*args, **kwargs)


def test_fsdp2_loads_ours(group: Any, path: Path) -> None:
    model, optimizer = ours(group)
    train(model, optimizer)
    place = save(path, model, optimizer)
    other, its = theirs(seed=1)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
    quietly(dcp.load, state, checkpoint_id=place)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same_run(group, model, optimizer, other, its)


@pytest.mark.parametrize("keys", [("model", "optimizer"), ("model", "optim"), ("net", "opt")])
def test_we_load_that_of_fsdp2(group: Any, path: Path, keys: tuple[str, str]) -> None:
    other, its = theirs()
    train(other, its)
    quietly(dcp.save, dict(zip(keys, get_state_dict(other, its), strict=True)), checkpoint_id=path)
    model, optimizer = ours(group, seed=1)
    optimizer.param_groups[0]["lr"] = 0.5
    assert load(path, model, optimizer) == {}
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert_same_run(group, model, optimizer, other, its)
    train(model, optimizer, 1)


def test_an_unsharded_program(group: Any, path: Path) -> None:
    """One process without sharding saves and loads; all ranks do the same, each with files of its own."""
    mine = path / str(dist.get_rank(group))
    plain = net()
    its = optim.AdamW(plain.parameters(), lr=0.01)
    plain(torch.ones(2, 6)).square().mean().backward()
    its.step()
    state = {"model": get_model_state_dict(plain), "optimizer": get_optimizer_state_dict(plain, its)}
    quietly(dcp.save, state, checkpoint_id=mine, no_dist=True)
    model, optimizer = ours(group, seed=1, stage=2)
    load(path / "0", model, optimizer)
    assert_same_run(group, model, optimizer, plain, its)
    place = save(path / "ours", model, optimizer)
    fresh = net(seed=2)
    again = optim.AdamW(fresh.parameters(), lr=0.3)
    for options in ({"checkpoint_id": place}, {"storage_reader": SafeReader(place), "planner": SafeLoadPlanner()}):
        state = {"model": get_model_state_dict(fresh), "optimizer": get_optimizer_state_dict(fresh, again)}
        quietly(dcp.load, state, no_dist=True, **options)
        set_model_state_dict(fresh, state["model"])
        set_optimizer_state_dict(fresh, again, state["optimizer"])
        assert_same_run(group, model, optimizer, fresh, again)
        assert again.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(("stage", "state"), [(3, "fp32"), (3, "int8"), (1, "bf16"), (0, "fp32")])
def test_plain_dcp(group: Any, path: Path, stage: int, state: str) -> None:
    """A program that knows only `state_dict()` and DCP, as one of FSDP2's would be written."""
    model, _ = ours(group, stage=stage)
    optimizer = AdamW(model.parameters(), state=state)
    train(model, optimizer)
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    assert {name: value.shape for name, value in saved["model"].items()} == {
        name: value.shape for name, value in net().state_dict().items()
    }
    quietly(dcp.save, saved, checkpoint_id=path)
    straight = model.full_state_dict()
    other, _ = ours(group, seed=1, stage=stage)
    resumed = AdamW(other.parameters(), state=state)
    train(other, resumed, 1)  # so that there are moments to load into
    loaded = {"model": other.state_dict(), "optim": resumed.state_dict()}
    quietly(dcp.load, loaded, checkpoint_id=path)
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optim"])
    same_state(other.full_state_dict(), straight)
    train(model, optimizer)
    train(other, resumed)
    same_state(other.full_state_dict(), model.full_state_dict())


def test_the_siblings_of_get_model_state_dict_work(group: Any, path: Path) -> None:
    """PyTorch's functions for state dicts of distributed models."""
    model, optimizer = ours(group)
    train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    assert weights.keys() == net().state_dict().keys()
    assert moments["state"]["0.weight"]["exp_avg"].shape == (10, 6)
    other, its = ours(group, seed=1)
    set_state_dict(other, its, model_state_dict=weights, optim_state_dict=moments)
    train(model, optimizer)
    train(other, its)
    same_state(other.full_state_dict(), model.full_state_dict())
    for value in weights.values():
        assert isinstance(value, Tensor)
        with pytest.raises(LayoutError, match=r"full_tensor\(\) for the full"):
            value.sum()
    whole_again = model.full_state_dict()
    set_model_state_dict(other, whole_again, options=StateDictOptions(full_state_dict=True))
    same_state(other.full_state_dict(), whole_again)


def test_what_is_not_clear_is_an_error(group: Any, path: Path) -> None:
    """Raise an error if a name may mean either of two models."""
    mine = path / str(dist.get_rank(group))
    quietly(dcp.save, {"net": net(1).state_dict(), "ema": net(2).state_dict()}, checkpoint_id=mine, no_dist=True)
    model, optimizer = ours(group)
    with pytest.raises(CheckpointError, match=r"several models with these names, under ema\., net\."):
        load(path / "0", model)
    train(model, optimizer)
    place = save(path / "ours", model, optimizer)
    with pytest.raises(CheckpointError, match=r"is of a different model: it lacks model\.bias"):
        load(place, ShardLite(nn.Linear(10, 10), group=group))
    raw = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    quietly(dcp.save, raw, checkpoint_id=path / "raw")
    with pytest.raises(CheckpointError, match="has an optimizer's parameters by number"):
        load(path / "raw", model, optimizer)


# ---- safetensors -----------------------------------------------------------------------------------------------------


def exported_body(group: Any, path: Path) -> dict[str, Tensor]:
    model, optimizer = ours(group)
    train(model, optimizer)
    save(path, model, optimizer, step=3)
    return model.full_state_dict()


def test_weights_go_to_safetensors_files_and_back(cluster, tmp_path, capsys):
    expected = cluster.run(exported_body, 3, tmp_path / "run")[0]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one' / 'model.safetensors'}\n"
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == expected.keys()
    same_state(expected, found)
    before = os.umask(0o027)
    try:
        written = export_weights(
            tmp_path / "run" / "step-00000003", tmp_path / "many", largest=150, dtype=torch.bfloat16
        )
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in written} == {0o640}, "as new files have them"
    assert [path.name for path in written][-2:] == ["model-00003-of-00003.safetensors", "model.safetensors.index.json"]
    index = json.loads(written[-1].read_text())
    assert index["metadata"]["total_size"] == 2 * sum(value.numel() for value in expected.values())
    for name, file in index["weight_map"].items():
        same_bits(name, load_file(tmp_path / "many" / file)[name], expected[name].to(torch.bfloat16))
    with pytest.raises(CheckpointError, match="has weights already: choose another folder"):
        export_weights(tmp_path / "run", tmp_path / "many")
    assert main(["import", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert "there is no model.safetensors, and no model.safetensors.index.json" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "many"), str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'again' / 'step-00000000'}\n"
    for folder in ("one", "many", "again"):
        for got in cluster.run(imported_body, 2, tmp_path / folder):
            for name, value in expected.items():
                rounded = value if folder == "one" else value.to(torch.bfloat16).float()
                same_bits(name, got[name], rounded)


def imported_body(group: Any, path: Path) -> dict[str, Tensor]:
    model, _ = ours(group, seed=1)
    load(path, model)
    return model.full_state_dict()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(3.0))


def test_tied_weights_and_damaged_files(group: Any, path: Path) -> None:
    """Of tied weights one name is enough."""
    model = ShardLite(Tied(), group=group)
    expected = {"table.weight": torch.randn(9, 4), "scale": torch.tensor(2.0)}
    mine = path / str(dist.get_rank(group))
    mine.mkdir()
    save_file(expected, mine / "model.safetensors")
    dist.barrier(group)
    load(path / "0", model)
    got = model.full_state_dict()
    same_bits("head.weight", got["head.weight"], load_file(path / "0" / "model.safetensors")["table.weight"])
    same_bits("scale", got["scale"], torch.tensor(2.0))
    dist.barrier(group)
    (mine / "model.safetensors").write_bytes(b"12345678 not a header")
    dist.barrier(group)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: "):
        load(path / "0", model)


@pytest.mark.slow
def test_transformers_reads_what_is_exported_and_we_read_what_it_saves(cluster, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=31)
    cluster.check(pretrained_body, 2, tmp_path, config)
    config.save_pretrained(tmp_path / "exported")
    export_weights(tmp_path / "run", tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, value in expected.state_dict().items():
        same_bits(name, model.state_dict()[name], value + 1)


def pretrained_body(group: Any, path: Path, config: Any) -> None:
    from transformers import GPT2LMHeadModel

    if dist.get_rank(group) == 0:
        GPT2LMHeadModel(config).save_pretrained(path / "saved")
    dist.barrier(group)
    model = ShardLite(GPT2LMHeadModel(config), group=group)
    load(path / "saved", model)
    with model.gathered(), torch.no_grad():
        for param in model.module.parameters():
            param.add_(1)
    save(path / "run", model)


# ---- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_summarizes_and_checks_files(cluster, tmp_path, capsys):
    cluster.run(exported_body, 2, tmp_path)
    place = tmp_path / "step-00000003"
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{place}", "step 3, saved by 2 ranks at stage 3, format 1"]
    assert [line.split() for line in lines[3:7]] == [
        ["0", "1", "2", "70", "float32", "280", "B", "568", "B"],  # two moments, and a step count for each parameter
        ["1", "1", "2", "110", "float32", "440", "B", "888", "B"],
        ["2", "1", "2", "20", "float32", "80", "B", "168", "B"],
        ["all", "6", "200", "float32", "800", "B", "1.6", "KiB"],
    ]
    assert lines[7:10] == [
        "optimizer: step, exp_avg, exp_avg_sq in float32, for 6 parameters in 1 group",
        "  group 0: 6 parameters, lr 0.01, betas (0.9, 0.999), weight_decay 0.01",
        "extra and states of random number generators of 2 ranks",
    ]
    assert re.fullmatch(r"all 3 files \([\d.]+ KiB\) have the checksums with which they were written", lines[10])
    assert main(["inspect", str(tmp_path), "--all"]) == 0
    listed = capsys.readouterr().out.splitlines()[2:27]
    assert [line.split() for line in listed if line.split()[0] in ("model.0.weight", "model.1.0.weight")] == [
        ["model.0.weight", "[10,", "6]", "float32", "240", "B", "1", "part"],
        ["model.1.0.weight", "[10,", "10]", "float32", "400", "B", "3", "parts"],
    ]
    assert listed[-1].startswith("optimizer: ")
    content = bytearray((place / "__0_0.distcp").read_bytes())
    content[-1] ^= 1
    (place / "__0_0.distcp").write_bytes(content)
    assert main(["inspect", str(place), "--no-check"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:-1]
    (place / "__1_0.distcp").unlink()
    assert main(["inspect", str(place)]) == 1
    said = capsys.readouterr()
    *_, first, second = said.out.splitlines()
    assert first.startswith(f"DAMAGED: {place}/__0_0.distcp is damaged: bytes 0 to ")
    assert second == f"DAMAGED: {place}/__1_0.distcp is missing"
    assert said.err == "shardlite: 2 of 3 files are missing or damaged\n"


def test_inspect_of_what_other_programs_wrote(tmp_path, capsys):
    quietly(dcp.save, {"model": net().state_dict()}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    assert main(["inspect", str(tmp_path / "foreign")]) == 0
    foreign = capsys.readouterr().out.splitlines()
    assert foreign[1] == "written by torch.distributed.checkpoint"
    assert foreign[-2:] == ["no optimizer", "all files have their lengths; there are no checksums"]
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err


class Deep(nn.Module):
    """A part with a long name, 48 equal blocks and one with other shapes, and 20 parts without numbers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(48)]
        self.body = nn.ModuleDict({"h": nn.ModuleList([*blocks, nn.Linear(8, 3)])})
        self.body.update({"a_name_of_more_than_forty_characters" * 2: nn.Linear(8, 2)})
        self.heads = nn.ModuleDict({f"head_{i}": nn.Linear(8, i + 1) for i in range(20)})


def deep_body(group: Any, path: Path) -> None:
    model = ShardLite(Deep(), group=group)
    groups = [{"params": [param], "lr": 0.001 * i} for i, param in enumerate(model.parameters())]
    save(path, model, optim.SGD(groups, momentum=0.9), step=1)


def test_a_summary_of_many_layers_fits_into_a_terminal(cluster, tmp_path, capsys):
    cluster.run(deep_body, 2, tmp_path)
    lines = _inspected(tmp_path, capsys)
    assert " ".join(lines[2].split()) == "part of the model blocks tensors elements dtype weights state"
    assert [line.split()[:3] for line in lines[3:6]] == [
        ["body", "196", "4,269"],
        ["heads", "40", "1,890"],
        ["all", "236", "6,159"],
    ]
    assert lines[6:11] == [
        "optimizer: no state, for 0 parameters in 236 groups",
        *(f"  group {i}: 1 parameter, lr {0.001 * i:g}, momentum 0.9, weight_decay 0" for i in range(3)),
        "  and 233 other groups",
    ]


def test_equal_blocks_share_a_line_of_a_summary(tmp_path, capsys):
    module = Deep()
    blocks = nn.ModuleList([nn.Linear(8, 4, bias=i % 3 > 0) for i in range(12)])
    state = {
        "model": {**module.body.state_dict(), **nn.ModuleDict({"mixed": blocks}).state_dict(), "scale": torch.ones(1)}
    }
    quietly(dcp.save, state, checkpoint_id=tmp_path, no_dist=True)
    rows = [line.split()[:4] for line in _inspected(tmp_path, capsys)[3:-3]]
    assert rows[0] == ["h.0-47", "48", "192", "4,224"]
    assert rows[1] == ["h.48", "1", "2", "27"]
    assert re.fullmatch(r"a_name_.*\.\..*characters", rows[2][0])
    assert rows[3:] == [
        ["mixed.0,3,..,9", "4", "4", "128"],
        ["mixed.1-2,4-5,..,10-11", "8", "16", "288"],
        ["scale", "1", "1", "float32"],
    ]


def _inspected(path: Path, capsys: Any) -> list[str]:
    """Return the lines of a summary, which fits into a terminal."""
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines[1:])) <= 80
    return lines


# ---- small tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(10)[3:7],
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.complex64),
    ],
)
def test_small_tensors_are_read_as_torch_reads_them(tensor):
    content = io.BytesIO()
    torch.save(tensor, content)
    got = small_tensor(content.getvalue())
    assert got is not None
    assert got.stride() == tensor.stride()
    assert got.dtype == tensor.dtype
    assert torch.equal(got, tensor)


OTHERS = [
    nn.Parameter(torch.ones(2)),
    {"x": torch.ones(2)},
    torch.ones(2).to_sparse(),
    torch.ones(2, dtype=torch.complex64).conj(),
]


@pytest.mark.parametrize("value", OTHERS)
def test_other_objects_are_left_to_torch(value):
    content = io.BytesIO()
    torch.save(value, content)
    assert small_tensor(content.getvalue()) is None
    assert small_tensor(content.getvalue()[:-30]) is None


def test_many_small_tensors_are_read_as_ranges(group: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a file opened by its package for each tensor, nor is an unpickler of PyTorch made for each."""
    many = nn.ParameterList([nn.Parameter(torch.full((3,), float(i))) for i in range(40)])
    model = ShardLite(many, group=group)
    optimizer = AdamW(model.parameters())
    for shard in model.parameters():
        shard.grad = torch.ones_like(shard)
    optimizer.step()
    save(path, model, optimizer)
    whole = model.full_state_dict()
    if dist.get_rank(group) == 0:
        (path / "weights").mkdir()
        save_file(whole, path / "weights" / "model.safetensors")
    dist.barrier(group)
    opened: list[str] = []

    def counted(call: Any, name: str) -> Any:
        return lambda *args, **kwargs: (opened.append(name), call(*args, **kwargs))[1]

    monkeypatch.setattr(torch, "load", counted(torch.load, "torch.load"))
    monkeypatch.setattr(safetensors, "safe_open", counted(safetensors.safe_open, "safe_open"))
    load(path / "step-00000000", model, optimizer)
    assert opened.count("torch.load") < 30
    same_state(model.full_state_dict(), whole)
    load(path / "weights", model)
    assert opened.count("safe_open") == 1
    same_state(model.full_state_dict(), whole)
