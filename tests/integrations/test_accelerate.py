"""Programs of Accelerate run on ShardLite after `install()`, with the bits of `DistributedDataParallel`."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate: `make test-all` installs it")

# ruff: noqa: E402
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    TorchDynamoPlugin,
    set_seed,
)
from torch.nn.parallel import DistributedDataParallel

from shardlite import AdamW, CheckpointError, LayoutError, PhaseError, Precision, ShardLite
from shardlite.integrations import accelerate as integration
from shardlite.integrations.accelerate import install, uninstall
from tests.support.markdown import ROOT
from tests.support.models.kept import CastsRouter, Mixture, Router
from tests.support.ranks.scripts import run_process, torchrun
from tests.support.twins.sharded import same_states

_BOUND = {"rtol": 1e-3, "atol": 1e-3}
"""Adam divides by the root of a mean of squares, so a tiny gradient of another last bit may step by a part of `lr`."""

HUB = ROOT / "tests" / "support" / "hub.py"
SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
PAGE = ROOT / "docs" / "accelerate.md"


@contextlib.contextmanager
def program(ranks: Any, /, *, on_gpu: bool = False, **options: Any) -> Iterator[Callable[..., Accelerator]]:
    """Give a function that builds accelerators, as a program that a launcher has started would; undo everything.

    If `on_gpu`, all ranks use the first GPU.
    """
    names = {"RANK": ranks.rank(), "WORLD_SIZE": ranks.size(), "LOCAL_RANK": 0 if on_gpu else ranks.rank()}
    names |= {"LOCAL_WORLD_SIZE": ranks.size(), "OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": str(not on_gpu)}
    environment, default = dict(os.environ), dist.group.WORLD
    os.environ.update({name: str(value) for name, value in names.items()})
    dist.group.WORLD = ranks
    if options:
        install(**{"timeout": timedelta(seconds=60), **options})
    try:
        yield Accelerator
    finally:
        uninstall()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.clear()
        os.environ.update(environment)
        dist.group.WORLD = default


def model_of(seed: int = 0) -> nn.Sequential:
    set_seed(seed)
    return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33, 5))


def loader_of() -> Any:
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 10, generator=made), torch.randint(5, (64,), generator=made))
    return DataLoader(data, batch_size=4)


def train(
    accelerator: Accelerator, model: nn.Module | None = None, *, clip: bool = False, folder: Path | None = None
) -> tuple[list[Tensor], Any]:
    """Train for an epoch; return losses, norms and weights. With a folder, go back to its state and train again."""
    model = model or model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    # The optimizer comes before its model.
    optimizer, loader, model, schedule = accelerator.prepare(optimizer, loader_of(), model, schedule)
    losses = []

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.detach())

    epoch()
    if folder is not None:
        accelerator.save_state(folder)
        epoch()
        first, losses = losses[len(losses) // 2 :], []
        accelerator.load_state(folder)
        epoch()
        assert torch.equal(torch.stack(first), torch.stack(losses))
    weights = model.full_state_dict() if isinstance(model, ShardLite) else model.module.state_dict()
    return losses, {name: value.to("cpu", copy=True) for name, value in weights.items()}


def assert_as_ddp(
    group: Any, options: Any, folder: Path | None = None, *, on_gpu: bool = False, **settings: Any
) -> None:
    """Assert that a training has the losses and weights of the same program without `install`."""
    clip = settings.pop("clip", False)
    exact = not clip and group.size() == 2  # norms, and sums of more gradients, are added in another order
    results = []
    for own in ({}, options):
        with program(group, on_gpu=on_gpu, **own) as make:
            at = folder / str(len(results)) if folder else None
            results.append(train(make(gradient_accumulation_steps=2, **settings), clip=clip, folder=at))
    (losses, weights), (sharded_losses, sharded_weights) = results
    if not exact:
        torch.testing.assert_close(sharded_losses, losses, **_BOUND)
        torch.testing.assert_close(sharded_weights, weights, **_BOUND)
    else:
        assert torch.equal(torch.stack(sharded_losses), torch.stack(losses))
        assert all(torch.equal(sharded_weights[name], weights[name]) for name in weights)


# ---- training -------------------------------------------------------------------------------------------------------


def test_a_program_has_the_bits_of_ddp_and_resumes(group, tmp_path):
    assert_as_ddp(group, {"stage": 3}, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"clip": True}, {"mixed_precision": "bf16"}], ids=str)
def test_each_stage_has_the_bits_of_ddp(group, stage, settings):
    assert_as_ddp(group, {"stage": stage}, **settings)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_hybrid_sharding_by_a_mesh(group, tmp_path):
    with program(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert_as_ddp(group, {"group": mesh}, tmp_path)


@pytest.mark.slow
def test_weights_are_gathered_in_16_bits_if_the_options_say_so(group):
    with program(group, precision=Precision(compute=torch.bfloat16)) as make:
        losses, _ = train(make(mixed_precision="bf16"))
        assert torch.stack(losses).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["router", Router])
@pytest.mark.stages(0, 3)
def test_kept_modules_have_the_bits_of_ddp_with_the_same_casts(group, stage, keep):
    """BatchNorm is kept too. DDP has fp32 weights in autocast, and a router that leaves autocast by itself."""
    results = []
    precision = Precision(compute=torch.bfloat16, keep=keep)
    for router, own in ((CastsRouter, {}), (Router, {"stage": stage, "precision": precision})):
        set_seed(0)
        with program(group, **own) as make:
            accelerator = make(gradient_accumulation_steps=2, mixed_precision="bf16")
            losses, weights = train(accelerator, Mixture(10, 5, router))
            results.append({**weights, "losses": torch.stack(losses)})
    same_states("epoch", results[1], results[0])


def step(accelerator: Any, *pairs: tuple[Any, Any]) -> None:
    for model, optimizer in pairs:
        accelerator.backward(model(torch.ones(4, 10)).square().mean())
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_two_models_with_hooks_and_custom_objects(group, tmp_path):
    class Counter:
        n = 3

        def state_dict(self) -> dict[str, int]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.n = state["n"]

    seen: list[Any] = []

    def on_save(models: list[Any], weights: list[Any], folder: str) -> None:
        seen.append(([type(each) for each in models], [len(each) for each in weights]))
        if accelerator.is_main_process:
            torch.save(weights, tmp_path / "weights.pt")
            weights.clear()

    def on_load(models: list[Any], folder: str) -> None:
        seen.append([type(each) for each in models])

    with program(group, stage=3) as make:
        accelerator, counter = make(), Counter()
        first, second = model_of(0), model_of(1)
        momentum = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
        adam = torch.optim.AdamW(second.parameters(), lr=0.1)
        momentum, first, second, adam = accelerator.prepare(momentum, first, second, adam)
        pairs = (first, momentum), (second, adam)
        step(accelerator, *pairs)
        accelerator.register_for_checkpointing(counter)
        accelerator.register_save_state_pre_hook(on_save)
        accelerator.register_load_state_pre_hook(on_load)
        accelerator.save_state(tmp_path / "state", safe_serialization=False)
        step(accelerator, *pairs)
        expected, counter.n = [model.full_state_dict() for model, _ in pairs], 7
        accelerator.load_state(str(tmp_path / "state"))
        step(accelerator, *pairs)
        assert counter.n == 3
        for (model, _), weights in zip(pairs, expected, strict=True):
            got = model.full_state_dict()
            assert all(torch.equal(got[name], weights[name]) for name in weights)
        assert len(torch.load(tmp_path / "weights.pt")) == 2  # of plain classes
        sizes = [6, 6] if group.rank() == 0 else [0, 0]
        assert seen == [([ShardLite] * 2, sizes), [ShardLite] * 2]
        assert {"shardlite_0", "shardlite_1", "custom_checkpoint_0.pkl"} <= set(os.listdir(tmp_path / "state"))


@pytest.mark.slow
def test_a_model_with_two_optimizers_resumes(group, tmp_path):
    with program(group, stage=3) as make:
        accelerator, model = make(), model_of()
        optimizers = [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(model[3].parameters()),
        ]
        *optimizers, model = accelerator.prepare(*optimizers, model)

        def both() -> dict[str, Tensor]:
            accelerator.backward(model(torch.ones(4, 10)).square().mean())
            for each in optimizers:
                each.step()
                each.zero_grad()
            return model.full_state_dict()

        both()
        accelerator.save_state(tmp_path)
        expected = both()
        accelerator.load_state(str(tmp_path))
        got = both()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def save_and_load_body(group: Any, options: Any, folder: Path, *, save: bool) -> list[float]:
    """Step once and save, or load; then step again and return the weights."""
    with program(group, **options) as make:
        accelerator, model = make(), model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if save:
            step(accelerator, (model, optimizer))
            accelerator.save_state(folder)
        else:
            accelerator.load_state(str(folder))
        step(accelerator, (model, optimizer))
        weights = model.full_state_dict() if isinstance(model, ShardLite) else model.module.state_dict()
        return torch.cat([each.flatten() for each in weights.values()]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_folder_loads_at_another_world_size(cluster, tmp_path, ranks):
    expected = cluster.run(save_and_load_body, 2, {"stage": 3}, tmp_path, save=True)[0]
    for got in cluster.run(save_and_load_body, ranks, {"stage": 2}, tmp_path, save=False):
        torch.testing.assert_close(got, expected)  # 3 ranks add the same gradients three times


@pytest.mark.slow
def test_a_folder_of_ddp_loads(cluster, tmp_path):
    expected = cluster.run(save_and_load_body, 2, {}, tmp_path, save=True)[0]
    assert cluster.run(save_and_load_body, 2, {"stage": 3}, tmp_path, save=False) == [expected] * 2


def three_models(accelerator: Any, seed: int, plain: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    """Prepare three models and the optimizers of two of them, and between these one of a parameter of no model.

    Models whose numbers are in `plain` are not wrapped. Return a function that steps, and returns all weights.
    """
    models: list[Any] = [model_of(seed + number) for number in range(3)]
    scale = nn.Parameter(torch.zeros(3))
    groups = models[0].parameters(), [scale], models[2].parameters()
    optimizers = [torch.optim.SGD(params, lr=1e-2, momentum=0.9) for params in groups]
    models = [accelerator.prepare_model(model, evaluation_mode=at in plain) for at, model in enumerate(models)]
    optimizers = accelerator.prepare(*optimizers)

    def advance() -> list[Tensor]:
        x = torch.ones(4, 10)
        nn.init.constant_(scale, 0.1)  # no folder has it, only the state of its optimizer
        accelerator.backward((scale.sum() * (models[0](x) + models[1](x).detach() + models[2](x))).square().mean())
        for each in optimizers:
            each.step()
            each.zero_grad()
        states = [each.full_state_dict() if isinstance(each, ShardLite) else each.state_dict() for each in models]
        return [value.clone() for state in states for value in (*state.values(), scale.detach())]

    return advance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "before", "after"),
    [({}, (1,), (1,)), ({"stage": 3}, (1,), (1,)), ({"stage": 3}, (1, 2), (1,))],
)
def test_unsharded_models_and_optimizers_load_beside_sharded_ones(group, tmp_path, saved, before, after):
    with program(group, **saved) as make:
        accelerator = make()
        advance = three_models(accelerator, 0, before)
        advance()
        accelerator.save_state(tmp_path)
        accelerator.wait_for_everyone()
        expected = advance()
    with program(group, stage=2) as make:
        accelerator = make()
        advance = three_models(accelerator, 5, after)
        accelerator.load_state(str(tmp_path))
        for got, wanted in zip(advance(), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.slow
def test_names_that_differ_load_if_strict_is_false(group, tmp_path):
    with program(group) as make:
        accelerator = make()
        compiled = torch.compile(model_of().append(nn.Linear(5, 5)), backend="eager")  # its names have a prefix
        model = accelerator.prepare(compiled)
        accelerator.save_state(tmp_path)
        accelerator.wait_for_everyone()
        expected = compiled._orig_mod[0].weight.detach()
    with program(group, stage=3) as make:
        accelerator = make()
        model = accelerator.prepare(model_of(1))
        with pytest.raises(LayoutError, match=r"4\.weight"):
            accelerator.load_state(str(tmp_path))
        accelerator.load_state(str(tmp_path), strict=False)
        assert torch.equal(model.full_state_dict()["0.weight"], expected)


@pytest.mark.slow
def test_ranks_that_see_different_folders_are_named(group, tmp_path):
    own = tmp_path / str(group.rank()) / "state"
    with program(group, stage=3) as make:
        accelerator = make()
        accelerator.prepare(model_of())
        accelerator.save_state(tmp_path / "0" / "state")
        accelerator.wait_for_everyone()
        with pytest.raises((LayoutError, ValueError), match=r"rank 1: Tried to find|^Tried to find"):
            accelerator.load_state(str(own))
        own.mkdir(parents=True, exist_ok=True)
        with pytest.raises(
            LayoutError, match=r"rank 0 has .*shardlite_0.*rank 1 has 'state' with \[\].*the same folder"
        ):
            accelerator.load_state(str(own))


@pytest.mark.slow
def test_a_model_is_prepared_again(group, tmp_path):
    with program(group, stage=3) as make:
        accelerator, model = make(), model_of()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.free_memory()
        accelerator.prepare(optimizer)
        for call in (accelerator.save_state, accelerator.load_state):
            with pytest.raises(LayoutError, match="free_memory"):
                call(str(tmp_path))
        other, late = make(), torch.optim.SGD(model.module.parameters(), lr=0.1)
        late, again = other.prepare(late, model)
        assert again is model
        assert other._models == [model]
        step(other, (model, late))
        expected = model.full_state_dict()
        other.save_state(tmp_path)
        step(other, (model, late))
        other.load_state(str(tmp_path))
        assert all(torch.equal(value, expected[name]) for name, value in model.full_state_dict().items())


@pytest.mark.slow
def test_what_save_model_writes_is_read_by_from_pretrained(group, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: `make test-all` installs it")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    with program(group, stage=3) as make:
        accelerator = make()
        model = accelerator.prepare(transformers.BertForMaskedLM(config))
        weights = model.full_state_dict()
        accelerator.save_model(model, tmp_path, max_shard_size="10KB")
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).config.save_pretrained(tmp_path)
        accelerator.wait_for_everyone()
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        read = transformers.BertForMaskedLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(read[name], weights[name]) for name in weights)


@pytest.mark.slow
def test_adapters_are_saved_as_the_page_says(group, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: `make test-all` installs it")
    peft = pytest.importorskip("peft", reason="needs peft: `make test-all` installs it")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    base = transformers.BertForSequenceClassification(config)
    adapters = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=False)
    code = re.search(r"```text\n(with model\.gathered.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    with program(group, stage=3) as make, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft
        accelerator = make()
        model = accelerator.prepare(peft.get_peft_model(base, adapters))
        weights = model.full_state_dict()
        exec(code[1], {"model": model, "accelerator": accelerator, "folder": str(tmp_path)})
        accelerator.wait_for_everyone()
        assert len(list(tmp_path.iterdir())) >= 2
        fresh = transformers.BertForSequenceClassification(config)
        read = peft.PeftModel.from_pretrained(fresh, str(tmp_path)).state_dict()
        names = [name for name in weights if "lora" in name or "modules_to_save" in name]
        assert len(names) >= 10
        assert all(torch.equal(read[name], weights[name]) for name in names)


@pytest.mark.slow
def test_preparation_in_any_order_and_again(group):
    with program(group, stage=3) as make:
        accelerator, plain = make(), model_of()
        model = accelerator.prepare(plain)
        optimizer = accelerator.prepare(torch.optim.SGD(plain.parameters(), lr=0.1))
        step(accelerator, (model, optimizer))
        assert accelerator.prepare(model) is accelerator.prepare(plain) is model
        assert accelerator.prepare(optimizer) is optimizer
        assert accelerator.unwrap_model(model) is plain
        assert accelerator._models == [model]
        weights, names = accelerator.get_state_dict(accelerator.unwrap_model(model)), model.full_state_dict().keys()
        assert weights.keys() == (names if group.rank() == 0 else set())
        own = ShardLite(model_of())
        assert accelerator.prepare(own) is own
        assert type(accelerator.prepare(model_of().requires_grad_(False))) is nn.Sequential
        fresh = model_of()
        fresh, ours = accelerator.prepare(fresh, AdamW(fresh.parameters()))
        step(accelerator, (fresh, ours))
        with torch.device("meta"):
            large = nn.Linear(4, 8)
        assert accelerator.prepare(large)(torch.ones(1, 4)).isfinite().all()
        assert accelerator.free_memory(model, optimizer) == [None, None]
        assert accelerator._models == []


@pytest.mark.slow
@pytest.mark.parametrize("regional", [False, True])
def test_a_dynamo_plugin_compiles_the_module_in_place(group, regional):
    with program(group, stage=3) as make, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        accelerator = make(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=regional))
        model = accelerator.prepare(model_of())
        accelerator.backward(model(torch.ones(4, 10)).mean())
        assert model.full_state_dict().keys() == model_of().state_dict().keys()


@pytest.mark.slow
def test_a_compiled_model_is_compiled_in_place(group):
    with program(group, stage=3) as make, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        accelerator, module, graphs = make(mixed_precision="bf16"), model_of(), []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph

        compiled = torch.compile(module, backend=backend)
        model, optimizer = accelerator.prepare(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
        step(accelerator, (model, optimizer))
        assert graphs
        assert accelerator.prepare(compiled) is make().prepare(torch.compile(model, backend=backend)) is model
        assert accelerator.unwrap_model(model) is module
        assert model.full_state_dict().keys() == model_of().state_dict().keys()


@pytest.mark.slow
def test_all_ranks_skip_a_step_of_the_gradient_scaler(group):
    with program(group, stage=3) as make:
        accelerator, model = make(), model_of()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # Accelerate has none for fp16 on a CPU
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        skipped = []
        for factor in (1.0, float("inf") if group.rank() == 1 else 1.0, 1.0):
            accelerator.backward(model(torch.ones(4, 10)).mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
        assert skipped == [False, True, False]


@pytest.mark.slow
def test_a_triggered_backward_reduces_inside_of_no_sync(group):
    with program(group, stage=3) as make:
        accelerator, model = make(), model_of()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with accelerator.no_sync(model):
            first, second = model(torch.ones(4, 10)).mean(), model(torch.zeros(4, 10)).mean()
            accelerator.backward(first)
            assert all(shard.grad is None for shard in model.parameters())
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second)
            optimizer.step()


@pytest.mark.slow
def test_ranks_with_different_numbers_of_batches(group):
    with program(group, stage=3) as make:
        accelerator, model = make(dataloader_config=DataLoaderConfiguration(even_batches=False)), model_of()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(20, 10)), batch_size=4))
        assert len(list(loader)) == 3 - group.rank()
        count = 0
        for (x,) in model.join(loader):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            count += 1
        assert count == 3
        with accelerator.join_uneven_inputs([model], even_batches=True):
            pass


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_work_is_refused_by_name(group, tmp_path):
    with program(group, stage=3) as make:
        accelerator, plain = make(), model_of()
        model = accelerator.prepare(plain)
        with pytest.raises(LayoutError, match="LocalSGD"), LocalSGD(accelerator, model, 2):
            pass
        with (
            pytest.raises(LayoutError, match=r"model\.join"),
            accelerator.join_uneven_inputs([model], even_batches=False),
        ):
            pass
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(4, 10)).mean())
        with pytest.raises(PhaseError, match=r"if accelerator\.sync_gradients"):
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        with pytest.raises(LayoutError, match="comm_hook='fp16'"):
            make(kwargs_handlers=[hook]).prepare(model_of())
        other = make(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, static_graph=True)])
        assert other.prepare(model_of())._first_ranks is None
        models = [model_of(), model_of()]
        shared = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
        accelerator.free_memory()
        accelerator.prepare(*models, shared)
        with pytest.raises(CheckpointError, match="one model"):
            accelerator.save_state(tmp_path)


def test_parameters_from_before_prepare_are_clipped_and_whole_weights_saved(group, tmp_path):
    """As programs end their steps, and themselves."""
    with program(group, stage=3) as make:
        accelerator, module = make(), model_of()
        captured = list(module.parameters())
        model = accelerator.prepare(module)
        accelerator.backward(model(torch.ones(4, 10)).square().mean())
        assert model.clip_grad_norm_(float("inf")) > 0.1
        accelerator.clip_grad_norm_(captured, 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(float("inf")), torch.tensor(0.1))
        accelerator.save(accelerator.get_state_dict(model), tmp_path / "weights.pt")
        dist.barrier(group)
        torch.testing.assert_close(
            torch.load(tmp_path / "weights.pt"), model.full_state_dict(rank=None), rtol=0, atol=0
        )


def test_wrong_options_are_refused():
    with pytest.raises(TypeError, match="unitz"):
        install(unitz=nn.Linear)
    with pytest.raises(ValueError, match="stage=4"):
        install(stage=4)
    assert not integration._options


@pytest.mark.slow
def test_install_replaces_the_options_and_can_be_undone(group):
    with program(group, stage=3) as make:
        install(stage=2)
        assert make().prepare(model_of()).stage == 2
        uninstall()
        assert isinstance(make().prepare(model_of()), DistributedDataParallel)


def only_rank_0_installs(group: Any) -> None:
    with program(group, **({"timeout": timedelta(seconds=5)} if group.rank() == 0 else {})) as make:
        make().prepare(model_of())


@pytest.mark.slow
def test_a_rank_that_has_not_installed_is_named(doomed, tmp_path):
    first, _ = doomed.run(only_rank_0_installs, 2, directory=tmp_path)
    assert "waiting for rank 1" in str(first)
    assert "install()" in str(first)


@pytest.mark.slow
def test_without_accelerate_the_error_says_what_to_install():
    done = run_process("-c", "import sys; sys.modules['accelerate'] = None; import shardlite.integrations.accelerate")
    assert done.status == 1
    assert "pip install 'shardlite[accelerate]'" in done.err


# ---- programs of accelerate -----------------------------------------------------------------------------------------


def changed(name: str, folder: Path) -> Path:
    """Copy a program of accelerate, with the changes that the page lists."""
    source = next(each for each in SCRIPTS.rglob(f"{name}.py")).read_text()
    lines, helper = re.search(rf"### {name}\n(.*?)(?=\n##)", PAGE.read_text(), re.DOTALL), ""
    for old, new in re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", lines[1] if lines else "", re.MULTILINE):
        assert old in source, old
        source = source.replace(old, new)
    if lines and (block := re.search(r"```python\n(.*?)```", lines[1], re.DOTALL)):
        helper = block[1]
    path = folder / f"{name}.py"
    head = "from shardlite.integrations.accelerate import install\ninstall()\n"
    path.write_text(head + helper + source)
    return path


def run(script: Path, *arguments: object, losses: Path | None = None) -> str:
    names = {"LOSSES": str(losses)} if losses else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        return torchrun(HUB, script, *arguments, warnings="default").out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last"), [("test_script", "Test reinstantiated state"), ("test_sync", "split_batches=False")]
)
def test_scripts_of_accelerate_run(tmp_path, name, last):
    pytest.importorskip("datasets", reason="needs datasets: `make test-all` installs it")
    assert last in run(changed(name, tmp_path))


@pytest.mark.slow
def test_the_checkpointing_script_has_the_losses_of_ddp_and_resumes(tmp_path):
    pytest.importorskip("datasets", reason="needs datasets: `make test-all` installs it")
    plain = SCRIPTS / "external_deps" / "test_checkpointing.py"
    run(plain, "--output_dir", tmp_path / "ddp", losses=tmp_path / "of_ddp")
    script = changed("test_checkpointing", tmp_path)
    run(script, "--output_dir", tmp_path / "own", losses=tmp_path / "own_losses")
    for rank in range(2):
        own, expected = ((tmp_path / f"{name}.{rank}").read_text() for name in ("own_losses", "of_ddp"))
        assert own == expected != ""
    resumed = run(script, "--output_dir", tmp_path / "own", "--resume_from_checkpoint", tmp_path / "own" / "epoch_0")
    assert "resumed checkpoint performance" in resumed


class Savable(nn.Linear):
    """Saves itself as models of Transformers and Diffusers do."""

    def save_pretrained(self, file: Path) -> None:
        torch.save(self.state_dict(), file)


def test_a_model_may_save_itself_on_every_rank_and_in_a_hook_on_one(group, tmp_path):
    with program(group, stage=3) as make:
        accelerator, module = make(), Savable(4, 4)
        model = accelerator.prepare(module)
        expected = model.full_state_dict()
        own = tmp_path / f"{group.rank()}.pt"
        for _ in range(2):
            accelerator.unwrap_model(model).save_pretrained(own)
            torch.testing.assert_close(torch.load(own), expected, rtol=0, atol=0)

        def on_save(models: list[Any], weights: list[Any], folder: str) -> None:
            if group.rank() == 0:
                accelerator.unwrap_model(models[0]).save_pretrained(tmp_path / "hook.pt")
                weights.pop()

        accelerator.register_save_state_pre_hook(on_save)
        accelerator.save_state(tmp_path / "state")
        dist.barrier(group)
        torch.testing.assert_close(torch.load(tmp_path / "hook.pt"), expected, rtol=0, atol=0)
        with pytest.raises(LayoutError, match="load_full_state_dict"):
            module.load_state_dict(expected)
