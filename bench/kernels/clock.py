"""Verify kernels, then time them in turn.

A `Work` can be set up for any number of elements. It is first set up for a few elements and compared with its
specification, then set up for many elements and timed. `Work`s that are compared run in the same rounds. Each round
starts with a different one, so a busy machine affects all of them.

Legend: `S` elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardlite.lab.timer import rotated, seconds

VERIFIED = 300_005
"""Number of elements in the comparison: several chunks on the CPU, many programs on a GPU, not a multiple of 32."""

WARM_UP = 2
"""Number of rounds that are not timed. They compile kernels and map memory."""

_LEAST_ROUNDS = 3
_SPILL = 1 << 29  # bytes: several times any cache of a GPU


class ResultError(Exception):
    """Raised if a kernel computes a wrong result. The kernel is not timed then."""


class Result(NamedTuple):
    """A tensor that a step changed, and the bound of its relative error in the Euclidean norm."""

    tensor: Tensor
    bound: float = 0.0
    """0 requires equal bits."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A work that is set up: its tensors are allocated."""

    step: Callable[[], object]
    """Function to time."""

    results: Callable[[], Sequence[Result]]
    """Function that returns the tensors that `step` changes."""

    expected: Callable[[], Sequence[Tensor]]
    """Function that returns the expected values of these tensors after the next step, without changing the tensors."""

    moved: int
    """Minimum number of bytes that a step reads and writes in these formats."""

    held: int
    """Bytes in tensors, including temporaries of a step."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """An operation to measure."""

    system: str
    """Library of the operation."""

    operation: str
    format: str
    make: Callable[[int, torch.device], Run]
    """Function that sets up the work for a number of elements on a device.

    Raises:
        ImportError: If a required package is not installed.
    """

    optional: bool = False
    """Whether the work may fail. Its row then has the reason instead of times."""

    at_most: float | None = None
    """Goal for the time, relative to PyTorch's fused operator in the same rounds."""

    share_at_least: float | None = None
    """Goal for the bandwidth, relative to the ceiling."""


class Verdict(NamedTuple):
    """Result of a comparison."""

    error: float
    """Largest relative error of a result."""

    tolerance_used: float
    """Error divided by its bound, or 0 if the bits are equal."""

    contract: str
    """`bits`, or `bound` if a result may have an error."""

    moved: int
    held: int
    """Bytes in tensors, as in `Run`."""


def verify(work: Work, device: torch.device) -> Verdict:
    """Take a step of `VERIFIED` elements, and compare the results.

    Raises:
        ResultError: If an error exceeds its bound.
        ImportError: If a required package is not installed.
    """
    run = work.make(VERIFIED, device)
    expected = [tensor.clone() for tensor in run.expected()]
    run.step()
    errors, used, bits = [0.0], [0.0], True
    for place, (result, right) in enumerate(zip(run.results(), expected, strict=True)):
        error = _error(result.tensor, right)
        allowed = error <= result.bound if result.bound else same_bits(result.tensor, right)
        if not allowed:
            raise ResultError(
                f"{work.operation} of {work.system} ({work.format}): result {place} is off by {error:.3g}, relative, "
                + (f"and may be by {result.bound:.3g}" if result.bound else "and must be equal to the bit")
            )
        errors.append(error)
        used.append(error / result.bound if result.bound else 0.0)
        bits = bits and not result.bound
    return Verdict(max(errors), max(used), "bits" if bits else "bound", run.moved, run.held)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Return whether both tensors have the same bits."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def _error(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape:
        return math.inf
    distance, size = float((got.double() - expected.double()).norm()), float(expected.double().norm())
    if distance == 0:
        return 0.0
    return distance / size if size and math.isfinite(distance) else math.inf


def bandwidth_run(size: int, device: torch.device) -> Run:
    """Return a bandwidth measurement with tensors of `size` bytes: a copy on a GPU, an addition in place on the CPU.

    A CPU reads memory before it writes, so a copy would move 1.5 times as many bytes as counted.
    """
    a, b = (torch.zeros(size // 4, device=device) for _ in range(2))
    on_cpu = device.type == "cpu"
    return Run(
        step=(lambda: a.add_(b)) if on_cpu else (lambda: a.copy_(b)),
        results=list,
        expected=list,
        moved=(3 if on_cpu else 2) * size,
        held=2 * size,
    )


class Sample(NamedTuple):
    """Seconds of one step."""

    wall: float
    """Time from the start of the step on the device to its end."""

    cpu: float
    """CPU time of all threads of this process, hardly affected by other programs. On a GPU, CPU time of the launch."""


class Clock(Protocol):
    """Measures the time of steps on a device."""

    def sample(self, step: Callable[[], object]) -> Sample:
        """Take a step and return its time."""


class HostClock:
    """Clock for computation on the host."""

    def sample(self, step: Callable[[], object]) -> Sample:
        """Take a step."""
        return Sample(*seconds(step, torch.device("cpu")))


_HEAD_START = 2_000_000
"""Cycles for which the GPU idles while the host launches a step."""


class DeviceClock:
    """Clock for computation on a GPU.

    Before each step, a large buffer is read to evict the step's tensors from the cache. The buffer is not written,
    because the write-back would take bandwidth from the step. The GPU then idles for about a millisecond while the host
    launches the step, so the time of a kernel does not include its launch. Longer launches leave gaps, as in training.
    """

    def __init__(self, device: torch.device) -> None:
        self._spill = torch.zeros(_SPILL // 4, device=device)

    def sample(self, step: Callable[[], object]) -> Sample:
        """Take a step."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        self._spill.sum()
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        start.record()
        cpu = process_time()
        step()
        cpu = process_time() - cpu
        end.record()
        end.synchronize()
        return Sample(float(start.elapsed_time(end)) / 1e3, cpu)


def time_runs(runs: Mapping[str, Run], clock: Clock, rounds: int, budget: float) -> dict[str, list[Sample]]:
    """Take at most `rounds` samples of each run.

    A run ends once its steps have taken more than `budget` seconds. Samples with equal index are from one round.
    """
    for run in runs.values():
        for _ in range(WARM_UP):
            if clock.sample(run.step).wall > budget / _LEAST_ROUNDS:
                break
    taken: dict[str, list[Sample]] = {name: [] for name in runs}
    for turn in range(rounds):
        going = [name for name, samples in taken.items() if _goes_on(samples, turn, budget)]
        for name in rotated(going, turn) if going else ():
            taken[name].append(clock.sample(runs[name].step))
    return taken


def _goes_on(samples: Sequence[Sample], turn: int, budget: float) -> bool:
    within = turn < _LEAST_ROUNDS or sum(sample.wall for sample in samples) < budget
    return len(samples) == turn and within


def packed(held: Mapping[str, int], room: int) -> list[list[str]]:
    """Partition names into groups, in order, so that each group holds at most `room` bytes.

    A name that does not fit alone is in no group.
    """
    groups: list[list[str]] = []
    left = 0
    for name, nbytes in held.items():
        if nbytes > room:
            continue
        if not groups or nbytes > left:
            groups.append([])
            left = room
        groups[-1].append(name)
        left -= nbytes
    return groups
