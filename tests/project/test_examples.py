"""The examples run unchanged on two processes, with the bits of plain data parallel."""

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardlite.checkpoint import Checkpoint
from shardlite.lab.compared.gpt import GPT, GPTConfig
from shardlite.lab.train.text import draw_batch, read_corpus
from tests.support.ranks.scripts import run_script, torchrun
from tests.support.twins.plain import PaddedAdamW, Twin
from tests.support.twins.sharded import same_bits, same_states, slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RANKS = 2

Loss = Callable[[nn.Module], Tensor]


Run = Callable[..., str]
"""From a script and its arguments to what it prints on all ranks."""


def by_torchrun(script: Path, *arguments: object, warnings: str = "error") -> str:
    """Start a script as its documentation says."""
    done = torchrun(script, *arguments, warnings=warnings)
    assert not re.search("EscapedViewWarning|NonFiniteWarning", done.err), done.err
    return done.out


@pytest.fixture(params=["cluster", slow("torchrun")])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a script on the ranks that are there, and by its launcher."""
    if request.param == "torchrun":
        return by_torchrun
    cluster = request.getfixturevalue("cluster")
    return lambda script, *arguments: "".join(done.out for done in run_script(cluster, script, *arguments))


def needed(package: str) -> Any:
    """Import what an example is about, or skip the test."""
    return pytest.importorskip(package, reason=f"needs {package}: `make test-all` installs it", exc_type=ImportError)


def printed(name: str, output: str) -> list[str]:
    return re.findall(rf"\b{name} ([\d.]+)", output)


class PlainTraining:
    """What the example must reproduce: one process that runs the batches of all ranks, with nothing sharded."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], Any],
        max_norm: float | None = 1.0,
    ) -> None:
        self.max_norm = max_norm
        self.twin = Twin(module, RANKS)
        self.optimizer = make_optimizer(self.twin.masters)

    def step(self, losses: Callable[[int], Sequence[Loss]]) -> None:
        """Take a step on the losses of each rank, whose gradients it adds up."""

        def backward(module: nn.Module, rank: int) -> None:
            for loss in losses(rank):
                loss(module).backward()

        self.twin.backward(backward)
        if self.max_norm is not None:
            self.twin.clip_grad_norm(self.max_norm)
        self.optimizer.step()
        self.twin.zero_grad()

    def assert_same(self, got: Mapping[str, Tensor]) -> None:
        expected = self.twin.state_dict()
        same_states("state", got, expected)


def adamw(**options: Any) -> Callable[[Mapping[str, nn.Parameter]], PaddedAdamW]:
    return lambda masters: PaddedAdamW([p for p in masters.values() if p.requires_grad], **options)


def mean(losses: Iterable[Tensor]) -> str:
    """The mean as the examples print it."""
    collected = [loss.item() for loss in losses]
    return f"{sum(collected) / len(collected):.4f}"


# ---- the loop -------------------------------------------------------------------------------------------------------


def test_the_plain_loop_learns_and_goes_on_from_what_it_saved(run, tmp_path):
    from examples import plain_loop

    output = run(EXAMPLES / "plain_loop.py", "--steps", 2, "--every", 1, "--out", tmp_path / "first")
    losses = printed("validation", output)
    assert float(losses[1]) < float(losses[0]) < 5.6  # a model that has not begun has 5.55
    resumed = ["--steps", 2, "--resume", tmp_path / "first" / "step-00000001", "--out", tmp_path / "second"]
    assert printed("validation", run(EXAMPLES / "plain_loop.py", *resumed)) == losses[1:]
    weights, again = (saved_weights(tmp_path / folder / "step-00000002") for folder in ("first", "second"))
    assert weights.keys() == again.keys() == GPT(plain_loop.CONFIG).state_dict().keys()
    same_states("state", weights, again)

    text = read_corpus(None, context=plain_loop.CONFIG.context, limit=1 << 20)
    torch.manual_seed(0)
    plain = PlainTraining(GPT(plain_loop.CONFIG), lambda masters: _decayed(plain_loop, masters))
    schedule = LambdaLR(plain.optimizer, lambda step: min((step + 1) / plain_loop.WARMUP, 1 - step / 3))
    shape = (plain_loop.BATCH, plain_loop.CONFIG.context)
    for step in range(2):
        keys = [(0, step, rank, micro) for rank in range(RANKS) for micro in range(2)]
        batches = {key[2:]: draw_batch(text.train, shape=shape, key=key) for key in keys}
        plain.step(lambda rank, b=batches: [lambda m, x=b[rank, i]: m(*x) / 2 for i in range(2)])
        schedule.step()
    plain.assert_same(weights)


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint as an unsharded program does."""
    checkpoint = Checkpoint(folder)
    names = [name for name in checkpoint.entries if name.startswith("model.")]
    return {name.removeprefix("model."): checkpoint.object(name) for name in names}


def _decayed(example: Any, masters: Mapping[str, nn.Parameter]) -> PaddedAdamW:
    matrices = [p for p in masters.values() if p.ndim >= 2]
    vectors = [p for p in masters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return PaddedAdamW(groups, lr=2e-3, betas=(0.9, 0.95))


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def language_model_batches(example: Any, part: str, step: int | None) -> list[Tensor]:
    """What each rank reads in a step, or when it validates."""
    text = getattr(read_corpus(None, context=example.CONTEXT, limit=1 << 20), part)
    keys = [(0, rank) if step is None else (0, rank, step) for rank in range(RANKS)]
    return [draw_batch(text, shape=(example.BATCH, example.CONTEXT), key=key)[0] for key in keys]


def train_plainly(example: Any, module: nn.Module, steps: int, **options: Any) -> PlainTraining:
    plain = PlainTraining(module.train(), adamw(**options))
    for step in range(steps):
        batches = language_model_batches(example, "train", step)
        plain.step(lambda rank, b=batches: [lambda m: m(input_ids=b[rank], labels=b[rank]).loss])
    return plain


@torch.no_grad()
def validation(example: Any, module: nn.Module) -> str:
    batches = language_model_batches(example, "validation", None)
    return mean(module.eval()(input_ids=x, labels=x).loss for x in batches)


@pytest.mark.slow
def test_gpt2_is_fine_tuned_and_read_by_from_pretrained(tmp_path):
    transformers = needed("transformers")
    from examples import finetune_gpt2 as example

    torch.manual_seed(1)
    base = example.make_model(None, reads=True)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):  # ranks draw dropout for themselves
        setattr(base.config, name, 0.0)
    base.save_pretrained(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    before = validation(example, base)

    options = ["--model", tmp_path / "base", "--steps", 6, "--checkpointing", "--out", tmp_path / "tuned"]
    output = by_torchrun(EXAMPLES / "finetune_gpt2.py", *options)
    tuned = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tuned")
    assert tuned.lm_head.weight is tuned.transformer.wte.weight
    assert printed("validation", output) == [validation(example, tuned)]
    assert float(validation(example, tuned)) < float(before)
    train_plainly(example, base, 6, lr=1e-3, weight_decay=0.1).assert_same(tuned.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft uses an old name
def test_lora_trains_adapters_only_and_peft_loads_them(tmp_path):
    peft = needed("peft")
    from examples import lora as example

    steps = 10
    output = by_torchrun(
        EXAMPLES / "lora.py", "--steps", steps, "--out", tmp_path, warnings="error,ignore::FutureWarning"
    )
    torch.manual_seed(0)
    base = example.make_base(None)
    untouched = copy.deepcopy(base)
    torch.manual_seed(0)
    module = peft.get_peft_model(example.make_base(None), example.LORA)
    before = validation(example, module)
    whole = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert f"{whole:,} parameters, {trained:,} are trained" in output

    loaded = peft.PeftModel.from_pretrained(untouched, tmp_path)
    assert printed("validation", output) == [validation(example, loaded)]
    assert float(validation(example, loaded)) < float(before)
    plain = train_plainly(example, module, steps, lr=5e-3)
    plain.assert_same(loaded.state_dict())  # adapters and base
    for name, value in base.state_dict().items():
        inside = name.replace("_proj.", "_proj.base_layer.")
        same_bits(name, loaded.get_base_model().state_dict().get(inside, value), value)

    held = dict(re.findall(r"^ *([a-z ]+?)  +([\d.]+) MiB", output, flags=re.MULTILINE))
    mib = 1 << 20
    assert float(held["parameters"]) == pytest.approx(4 * whole / RANKS / mib, abs=0.1)
    assert float(held["gradients"]) == pytest.approx(4 * trained / RANKS / mib, abs=0.1)
    assert float(held["optimizer state"]) == pytest.approx(8 * trained / RANKS / mib, abs=0.1)


# ---- trainers -------------------------------------------------------------------------------------------------------


Batch = Sequence[Tensor]


def plainly_trained(steps: Callable[[TensorDataset, int], Iterable[Sequence[Batch]]]) -> dict[str, Tensor]:
    """Return the weights of the GPT of two examples. `steps` yields batches of all ranks, from data and epoch."""
    text = read_corpus(None, context=64, limit=1 << 20)
    torch.manual_seed(0)
    make_optimizer = lambda masters: torch.optim.AdamW(masters.values(), lr=2e-3)  # noqa: E731
    plain = PlainTraining(GPT(GPTConfig(layers=2, width=64, heads=2, context=64)), make_optimizer, max_norm=None)
    data = TensorDataset(*draw_batch(text.train, shape=(640, 64), key=(0,)))
    for epoch in range(3):
        for batches in steps(data, epoch):
            plain.step(lambda rank, b=batches: [lambda m: m(*b[rank])])
    return plain.twin.state_dict()


def of_lightning(data: TensorDataset, epoch: int) -> Iterable[Sequence[Batch]]:
    """Shuffle, and give each rank every second sample."""
    samplers = [DistributedSampler(data, RANKS, rank, shuffle=True, seed=0) for rank in range(RANKS)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return zip(*(DataLoader(data, 8, sampler=sampler) for sampler in samplers), strict=True)


def of_accelerate(data: TensorDataset, epoch: int) -> Iterable[Sequence[Batch]]:
    """Give each rank every second batch."""
    batches = list(DataLoader(data, 8))
    return zip(batches[::2], batches[1::2], strict=True)


@pytest.mark.slow
def test_lightning_trains_by_its_strategy(tmp_path):
    needed("lightning")
    torchrun(EXAMPLES / "lightning_fit.py", folder=tmp_path, warnings="default")
    saved = torch.load(tmp_path / "runs" / "lightning" / "last.ckpt", weights_only=True)["state_dict"]
    plain = plainly_trained(of_lightning)
    same_states("state", {name.removeprefix("gpt."): value for name, value in saved.items()}, plain)


@pytest.mark.slow
def test_accelerate_prepares_the_model(tmp_path):
    needed("accelerate")
    from safetensors.torch import load_file

    done = torchrun(EXAMPLES / "accelerate_loop.py", folder=tmp_path, warnings="default")
    losses = [float(each) for each in printed("loss", done.out)]
    assert losses[2] < losses[1] < losses[0] < 5.5
    folder = tmp_path / "runs" / "accelerate"
    assert (folder / "state" / "shardlite_0").is_dir()
    saved = load_file(folder / "model" / "model.safetensors")
    plain = plainly_trained(of_accelerate)
    same_states("state", saved, {name: plain[name] for name in saved})


@pytest.mark.slow
def test_trl_fine_tunes_and_saves_for_from_pretrained(cluster, tmp_path):
    needed("trl")
    needed("datasets")
    transformers = needed("transformers")
    run_script(cluster, EXAMPLES / "sft.py", folder=tmp_path, warnings="ignore")
    folder = tmp_path / "runs" / "sft"
    assert (folder / "checkpoint-50" / "shardlite").is_dir()
    logged = json.loads((folder / "checkpoint-50" / "trainer_state.json").read_text())["log_history"]
    losses = [each["loss"] for each in logged if "loss" in each]
    assert losses[-1] < losses[0] < 6
    assert transformers.LlamaForCausalLM.from_pretrained(folder).num_parameters() > 0


# ---- documentation --------------------------------------------------------------------------------------------------


OF_TRAINER = ("--max_steps", "--resume_from_checkpoint")
"""Options of examples that are fields of `transformers.TrainingArguments`."""


def test_the_list_of_examples_is_complete_and_its_commands_exist():
    text = (EXAMPLES / "README.md").read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert all((EXAMPLES / link).exists() for link in links)
    assert scripts <= set(links)
    documented = text + "".join((EXAMPLES / script).read_text() for script in scripts)
    start = r"(?:torchrun --nproc-per-node 2|python) examples/"
    commands = re.findall(start + r"(\w+\.py)((?: --?\S+(?: [^-\s]\S*)?)*)", documented)
    assert {script for script, _ in commands} == scripts - {"largest_systems.py"}
    for script, options in commands:
        text = (EXAMPLES / script).read_text()
        for option in re.findall(r"--[a-z_]+", options):
            assert f'"{option}"' in text or ("HfArgumentParser" in text and option in OF_TRAINER), (script, option)
