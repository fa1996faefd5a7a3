"""Whole runs at one rank: beside a plain twin, and with blocks that `torch.compile` has compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.report import Report, milliseconds
from bench.support.ranks import only_rank
from bench.support.systems import FORMATS, MIXED, Build, Trainer, build_plain, build_shardlite
from bench.support.workloads import WORKLOADS, Batch, Workload, perceptrons, transformers_gpt2
from bench.support.workloads import compiled as with_compiled_blocks
from shardlite.apps.footprint.systems import torch_adamw

STEPS = 20
NEAR = 0.05
"""By which the losses of a format may be off, as a part of the plain model's."""

_BF16 = torch.bfloat16


def twin(report: Report) -> None:
    """Losses of 20 steps of GPT-2 in bf16 with checkpointing: all stages to the bit, and formats near a plain twin."""
    with only_rank(report.device) as group:
        workload = _gpt2(report.dry).on(report.device)
        steps = 3 if report.dry else STEPS
        plain, plain_fp32 = _losses(Mastered(workload), workload, steps), None
        report(system="twin", steps=steps, words=workload.words, first_loss=plain[0], last_loss=plain[-1])
        again = [_losses(build_shardlite(workload, group, stage=3, compute=_BF16), workload, steps) for _ in range(2)]
        first, repeats = again[0], again[0] == again[1]
        report(system="stage3, twice", steps=steps, same_as_stage3=repeats)
        builds: dict[str, Build] = {
            f"stage{stage}": partial(build_shardlite, stage=stage, compute=_BF16) for stage in (3, 2, 1, 0)
        }
        for name, build in [*builds.items(), *FORMATS.items()]:
            with report.guarded(system=name):
                expected = plain
                if name == "in_backward":  # it computes in fp32
                    expected = plain_fp32 = plain_fp32 or _losses(build_plain(workload, group), workload, steps)
                losses = _losses(build(workload, group), workload, steps)
                off = max(abs(got - want) / abs(want) for got, want in zip(losses, expected, strict=True))
                found: dict[str, Any] = {"same_as_twin": losses == expected, "off": off, "last_loss": losses[-1]}
                if name in builds:
                    found["same_as_stage3"] = losses == first
                report(system=name, steps=steps, **found)
                assert off < NEAR, f"a loss is {100 * off:.1f} % off the twin's"
                same = found.get("same_as_stage3", True) or not repeats  # attention may add in another order each time
                assert same, "its losses have other bits than those of stage 3"


def _gpt2(dry: bool) -> Workload:
    if dry:
        return transformers_gpt2("gpt2", layers=1, width=768, vocabulary=8192, context=16, batch=1)
    return WORKLOADS["gpt2"]


class Mastered:
    """The plain model in bf16, stepped by PyTorch's fused AdamW on weights in fp32, as a program would write it."""

    def __init__(self, workload: Workload) -> None:
        self.model = workload.model()
        self._masters = [nn.Parameter(param.detach().clone()) for param in self.model.parameters()]
        self.model.to(_BF16)
        self._optimizer = torch_adamw(self._masters)

    def step(self, batch: Batch) -> Tensor:
        """Take one step of training, and return the loss, []."""
        loss: Tensor = self.model(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        params = list(self.model.parameters())
        for master, param in zip(self._masters, params, strict=True):
            master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        self._optimizer.step()
        with torch.no_grad():
            for master, param in zip(self._masters, params, strict=True):
                param.copy_(master)
        return loss.detach()


def _losses(trainer: Trainer | Mastered, workload: Workload, steps: int) -> list[float]:
    batch = workload.batch(0, 0)
    losses = [trainer.step(batch) for _ in range(steps)]
    return [float(loss) for loss in losses]


def compiled(report: Report) -> None:
    """Steps with compiled blocks, in both modes of `torch.compile`, beside FSDP2 and without compilation."""
    ways: dict[str, dict[str, Any] | None] = {"no": None, "default": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    workload = perceptrons("mlp", blocks=4, width=64 if report.dry else 2048, batch=4 if report.dry else 4096)
    with only_rank(report.device) as group:
        for way, options in ways.items():
            each = workload.on(report.device)
            if options is not None:
                each = with_compiled_blocks(each, **({"backend": "eager"} if report.dry else options))
            for name in ("standard", "fsdp2"):
                with report.guarded(system=name, compiled=way):
                    torch.compiler.reset()
                    trainer, batch = MIXED[name](each, group), each.batch(0, 0)
                    step = partial(trainer.step, batch)
                    milliseconds(step, report.device, 3)
                    found = milliseconds(step, report.device, 1 if report.dry else 10)
                    report(system=name, compiled=way, words=workload.words, **found)
