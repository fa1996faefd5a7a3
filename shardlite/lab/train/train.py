"""The demo: train a small GPT on text over several ranks, as a user of ShardLite would.

`train` calls the phases in the order of this file. Every rank runs all phases. Only rank 0 prints and writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite import LayoutError, Precision, Route, ShardLite, load, save, save_in_memory
from shardlite.cli import on_signals, precision_of, process_group
from shardlite.comm import all_gather_json
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.memory.peak import Batch, Footprint, measure_plain, measure_step, track_state
from shardlite.lab.train import report
from shardlite.lab.train.log import Reporter, open_log
from shardlite.lab.train.optimizers import make_optimizer
from shardlite.lab.train.report import Point, StepTraffic
from shardlite.lab.train.settings import Settings
from shardlite.lab.train.text import Bytes, Corpus, draw_sequences, unigram_entropy
from shardlite.plan import Fit, Planner, Setting, Source, memory_of, search
from shardlite.wrapping import offload_of

MAX_NORM = 1.0
SAMPLE_BYTES = 240

_MEASURED_STEP = 2  # index of the step that is measured; earlier steps allocate the optimizer state and all buffers
_VALIDATIONS = 8  # number of validations, at equal intervals; the last validation is at the end of the run
_VALIDATION_BATCHES = 8
_TRAIN, _VALIDATION = 0, 1  # numbers that stand for the two parts of the text in the keys of sequences


@dataclass(frozen=True)
class Run:
    """Objects that stay the same throughout the run."""

    settings: Settings
    corpus: Corpus
    model: ShardLite
    optimizer: Optimizer
    peaks: Sequence[float]
    """Peak learning rate of each parameter group."""

    scaler: torch.amp.GradScaler
    """Gradient scaler, which is enabled if forward and backward run in fp16."""

    traffic: StepTraffic
    fit: Fit | None
    """The run that `Settings.fit` has chosen."""

    rank: int
    ranks: int
    device: torch.device


def train(settings: Settings, corpus: Corpus) -> None:
    """Train on `corpus`, validate, report the result, and print a sample of text."""
    with process_group() as device:
        fit = None if settings.fit is None else _find_fit(settings, device)
        settings = settings if fit is None else fitted(settings, fit)
        plain = _measure_data_parallel(settings, corpus, device)
        run = _set_up(settings, corpus, device, fit)
        _announce(run)
        curve, drawn = _resume(run)
        sharded = _learn(run, curve, drawn)
        if len(curve) < settings.steps:
            if run.rank == 0:
                print(f"Stopped by SIGTERM. The run can resume after step {len(curve)}, from {settings.checkpoints}.")
            return
        if sharded is not None:
            _report(run, curve, sharded, plain)
        _show_sample(run)


def _measure_data_parallel(settings: Settings, corpus: Corpus, device: torch.device) -> Footprint:
    """Return this rank's footprint without sharding. All memory of the model is freed on return."""
    batches = [_draw(settings, corpus.train, device, _TRAIN, first) for first in _firsts(settings, 0, 0, ranks=1)]
    return measure_plain(_make_gpt(settings).to(device), batches, MAX_NORM)


def _find_fit(settings: Settings, device: torch.device) -> Fit:
    """Return the run that fits into `settings.fit`, and print it.

    Raises:
        SystemExit: nothing fits.
    """
    start = Setting(
        stage=settings.stage,
        world_size=dist.get_world_size(),
        precision=precision_of_run(settings),
        state=settings.state,
        in_backward=settings.in_backward,
        checkpoint=settings.activation_checkpointing,
        offload=offload_of(settings.offload),
        rows=settings.batch,
        accumulate=settings.accumulate,
        on_gpu=device.type == "cuda",
    )
    tokens = partial(torch.zeros, settings.batch, settings.gpt.context, dtype=torch.long)
    source = Source("the GPT", partial(GPT, settings.gpt), lambda: (tokens(), tokens()), "sequences of the text")
    try:
        found: Fit | LayoutError = search(Planner(source), start, memory_of(settings.fit or "", "--fit"))
    except LayoutError as nothing:
        found = nothing
    if dist.get_rank() == 0:
        print(f"{found}\n", flush=True)
    if isinstance(found, LayoutError):
        raise SystemExit(1)
    return found


def fitted(settings: Settings, fit: Fit) -> Settings:
    """Return the settings of a run that fits."""
    setting = fit.plan.setting
    narrow = setting.precision.compute == torch.bfloat16
    return replace(
        settings,
        stage=setting.stage,
        precision="bf16" if narrow else settings.precision,
        master="split24" if setting.precision.master == "split24" else settings.master,
        state=setting.state,
        in_backward=setting.in_backward,
        activation_checkpointing=setting.checkpoint,
        batch=fit.micro_batch,
        accumulate=fit.accumulate,
    )


def _set_up(settings: Settings, corpus: Corpus, device: torch.device, fit: Fit | None) -> Run:
    torch.manual_seed(settings.seed)
    transport: Any = settings.transport
    given = {"stage": settings.stage, "offload": settings.offload}
    options: dict[str, Any] = given if fit is None else fit.shardlite
    options["precision"] = precision_of_run(settings)  # logits are cast
    model = ShardLite(_make_gpt(settings), route=Route(transport=transport), device=device, **options)
    optimizer = make_optimizer(model, settings)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    peaks = [group["lr"] for group in optimizer.param_groups]
    ranks = dist.get_rank(), dist.get_world_size()
    return Run(settings, corpus, model, optimizer, peaks, scaler, StepTraffic(model), fit, *ranks, device)


def _make_gpt(settings: Settings) -> GPT:
    return GPT(settings.gpt, recompute=settings.activation_checkpointing)


def precision_of_run(settings: Settings) -> Precision:
    """Return the dtypes of a run. Logits are cast to fp32, in which the loss is computed."""
    compute = None if settings.precision == "fp32" else settings.precision
    precision = precision_of(compute, settings.reduce, settings.master)
    return replace(precision, output=None if compute is None else torch.float32)


def _announce(run: Run) -> None:
    parameters = run.model.numel()
    if run.rank == 0:
        ranks = "1 rank" if run.ranks == 1 else f"{run.ranks} ranks"
        print(f"A GPT with {parameters / 1e6:.1f}M parameters on {ranks}, stage {run.settings.stage}, reads")
        print(f"{run.corpus.source} ({len(run.corpus.train):,} bytes).", flush=True)


def _resume(run: Run) -> tuple[list[Point], int]:
    """Load the newest checkpoint or the copies in memory, if there are any.

    Return the curve, and the number of sequences drawn so far.
    """
    folder = run.settings.checkpoints
    if folder is None:
        return [], 0
    found = load(folder, run.model, run.optimizer, _scaling(run), missing_ok=True)
    curve = [Point(*each) for each in found.get("curve", ())]
    if run.rank == 0 and found.source:
        source = folder if Path(found.source).parent == folder else found.source
        print(f"The run resumes after step {len(curve)} of {run.settings.steps}, from {source}.", flush=True)
        before, now = found.get("options", {}), _options(run)
        for name in (name for name in now if before.get(name, now[name]) != now[name]):
            print(f"It continues with {name} {now[name]} instead of {before[name]}.", flush=True)
    return curve, found.get("sequences", 0)


def _save(run: Run, curve: Sequence[Point], drawn: int, *, ends: bool) -> None:
    """Copy the run into memory if redundancy is enabled. Save a checkpoint if one is due, or if `ends` is true."""
    settings, step = run.settings, len(curve)
    if settings.checkpoints is None:
        return
    points = [(each.step, each.train, each.validation) for each in curve]
    extra = {"curve": points, "sequences": drawn, "options": _options(run), **_scaling(run)}
    if settings.redundancy is not None:
        save_in_memory(settings.checkpoints, run.model, run.optimizer, extra, step=step)
    if ends or step % settings.save_every == 0 or step == settings.steps:
        save(settings.checkpoints, run.model, run.optimizer, extra, step=step, keep=2)


def _options(run: Run) -> dict[str, str]:
    """Return the number of ranks and the settings that a resumed run may change, as text by name."""
    chosen = asdict(run.settings)
    for each in ("gpt", "out", "log", "checkpoints", "save_every", "redundancy"):
        del chosen[each]
    return {"ranks": f"{run.ranks}", **{name: f"{value}" for name, value in chosen.items()}}


def _scaling(run: Run) -> dict[str, torch.amp.GradScaler]:
    return {"scaler": run.scaler} if run.scaler.is_enabled() else {}


def _learn(run: Run, curve: list[Point], drawn: int) -> Footprint | None:
    """Take the remaining steps and extend the curve. Return the memory of one of the first steps.

    `drawn` is the number of sequences drawn so far, by any number of ranks.
    """
    first, settings, asked = len(curve), run.settings, Event()
    with ExitStack() as until_the_end:
        if settings.checkpoints is not None:  # schedulers send SIGTERM before they end a job
            until_the_end.enter_context(on_signals(["SIGTERM"], lambda _: asked.set()))
        reporter = None
        if run.rank == 0:
            progress = report.Progress(settings.steps, _sequences_per_step(run) * settings.gpt.context, first=first)
            log = None if settings.log is None else open_log(settings.log, settings.out, after=first)
            reporter = until_the_end.enter_context(closing(Reporter(run.model, run.traffic, progress, log)))
        return _take_steps(run, curve, drawn, asked, reporter)


def _take_steps(run: Run, curve: list[Point], drawn: int, asked: Event, reporter: Reporter | None) -> Footprint | None:
    first, steps, footprint = len(curve), run.settings.steps, None
    for step in range(first, steps):
        if step == min(first + _MEASURED_STEP, steps - 1):
            values, footprint = _measured_step(run, step, drawn)
        else:
            values = _step(run, step, drawn)
        drawn += _sequences_per_step(run)
        if step == first:
            track_state(run.model.ledger, run.optimizer)
        run.traffic.end_step()
        if (step + 1) * _VALIDATIONS // steps > step * _VALIDATIONS // steps:
            with run.traffic.leave_out():
                values["validation_loss"] = _validate(run)
        curve.append(Point(step + 1, values["loss"], values.get("validation_loss")))
        if reporter is not None:
            reporter.show(curve[-1], values)
        ends = run.settings.checkpoints is not None and _mean_over_ranks(asked.is_set()) > 0
        _save(run, curve, drawn, ends=ends)
        if ends:
            break
    return footprint


def _step(run: Run, step: int, drawn: int) -> dict[str, float]:
    """Take an optimizer step on the sequences from number `drawn` on, and return the values of the step for the log."""
    settings, model, scaler = run.settings, run.model, run.scaler
    begin, loss, rate = time.perf_counter(), 0.0, learning_rate(settings, step)
    for group, peak in zip(run.optimizer.param_groups, run.peaks, strict=True):
        group["lr"] = rate * (peak / settings.lr)
    firsts = _firsts(settings, drawn, run.rank, ranks=run.ranks)
    sharded = run.fit is not None and run.fit.sharded
    for first in firsts:
        with nullcontext() if first == firsts[-1] else model.no_sync(sharded=sharded):
            part = _loss(model, *_draw(settings, run.corpus.train, run.device, _TRAIN, first)) / settings.accumulate
            scaler.scale(part).backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    values = {}
    if not settings.in_backward:
        scaler.unscale_(run.optimizer)
        values["gradient_norm"] = model.clip_grad_norm_(MAX_NORM).item()
    scaler.step(run.optimizer)
    scaler.update()
    run.optimizer.zero_grad()
    loss = _mean_over_ranks(loss)
    return {**values, "loss": loss, "learning_rate": rate, "step_ms": 1e3 * (time.perf_counter() - begin)}


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss in nats per byte, in the dtype of the model's outputs."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _measured_step(run: Run, step: int, drawn: int) -> tuple[dict[str, float], Footprint]:
    taken: list[dict[str, float]] = []
    footprint = measure_step(lambda: taken.append(_step(run, step, drawn)), run.model.ledger)
    return taken[0], footprint


def learning_rate(settings: Settings, step: int) -> float:
    """Return the rate of a step: a linear warmup over a tenth of the steps, then a cosine to a tenth of the peak."""
    warmup = math.ceil(settings.steps / 10)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / (settings.steps - warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def _validate(run: Run) -> float:
    """Return the mean loss on validation text. Each rank always validates on the same part of the text."""
    run.model.eval()
    losses = [
        _loss(run.model, *_draw(run.settings, run.corpus.validation, run.device, _VALIDATION, first)).item()
        for first in _firsts(run.settings, 0, run.rank, ranks=run.ranks, batches=_VALIDATION_BATCHES)
    ]
    run.model.train()
    return _mean_over_ranks(sum(losses) / len(losses))


def _report(run: Run, curve: list[Point], sharded: Footprint, plain: Footprint) -> None:
    """Print the quality of the model, the memory of a step, and the traffic of a mean step."""
    footprints = [Footprint(**each) for each in all_gather_json(None, asdict(sharded), "the memory of each rank")]
    if run.rank != 0:
        return
    entropy = unigram_entropy(run.corpus.validation)
    print(f"\n{report.describe_result(curve[-1].validation or math.nan, entropy)}")
    print(f"\nOne training step holds, each row at its highest:\n\n{report.footprint_table(footprints, plain)}\n")
    if run.ranks > 1:
        print(f"{report.describe_traffic(run.traffic.mean())}\n")
    print("\n".join(report.write_curve(run.settings.out, curve, entropy)), flush=True)


def _show_sample(run: Run) -> None:
    """Generate text on rank 0 with the full model, which fits into the memory of one rank."""
    weights = run.model.full_state_dict(rank=0)
    if run.rank != 0:
        return
    model = GPT(run.settings.gpt)
    model.load_state_dict(weights)
    sample = model.generate(b"\n", SAMPLE_BYTES, seed=run.settings.seed)
    print(f"\nThe model writes:\n{report.printable(sample)}")


def _firsts(settings: Settings, drawn: int, rank: int, *, ranks: int, batches: int | None = None) -> range:
    """Return the number of the first sequence of each batch of a rank, after `drawn` earlier sequences.

    The ranks take consecutive batches in turn.
    """
    count = settings.accumulate if batches is None else batches
    first, every = drawn + rank * settings.batch, ranks * settings.batch
    return range(first, first + count * every, every)


def _draw(settings: Settings, text: Bytes, device: torch.device, part: int, first: int) -> Batch:
    """Draw a batch from a part of the text. The batch consists of the sequences from number `first` on."""
    numbers = range(first, first + settings.batch)
    x, y = draw_sequences(text, settings.gpt.context, [(settings.seed, part, number) for number in numbers])
    return x.to(device), y.to(device)


def _sequences_per_step(run: Run) -> int:
    return run.ranks * run.settings.batch * run.settings.accumulate


def _mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
