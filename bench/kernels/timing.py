"""How kernels are measured: each result is compared first, then all are timed in turn.

A `Work` can be set up for any number of elements. It is set up small and compared with what it should compute, and only
then large and timed. Works that are compared with each other take their rounds together, and each round starts with
another one, so a machine that is busy is busy for all.

Legend: `S` elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

VERIFIED = 300_005
"""Elements that are compared: more than a chunk on the CPU, many programs on a GPU, and not whole groups of 32."""

WARM_UP = 2
"""Rounds that are not counted: by then kernels are compiled, and memory is mapped."""

_LEAST_ROUNDS = 3
_SPILL = 1 << 29  # bytes: several times any cache of a GPU


class ResultError(Exception):
    """A kernel computes something else than it should, so it is not timed."""


class Result(NamedTuple):
    """A tensor that a step has changed, and how far it may be off: the Euclidean norm of the error, relative."""

    tensor: Tensor
    bound: float = 0.0
    """0: equal to the bit."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A work whose tensors exist."""

    step: Callable[[], object]
    """What is timed."""

    results: Callable[[], Sequence[Result]]
    """What it changes."""

    expected: Callable[[], Sequence[Tensor]]
    """What these will be after a step from where they are now; it changes nothing."""

    moved: int
    """The fewest bytes that a step can read and write in these formats."""

    held: int
    """Bytes in tensors, those counted that live during a step only."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Something to measure."""

    system: str
    """Whose it is."""

    operation: str
    format: str
    make: Callable[[int, torch.device], Run]
    """Set it up for so many elements.

    Raises:
        ImportError: it is of a package that is not installed.
    """

    optional: bool = False
    """Whether it may fail: it is not ours, and then has a row that says why instead of a time."""

    at_most: float | None = None
    """The goal for its time, as a part of that of PyTorch's fused operator in the same rounds."""

    share_at_least: float | None = None
    """The goal for its bandwidth, as a part of the ceiling."""


class Verdict(NamedTuple):
    """What the comparison has found."""

    error: float
    """The largest relative error of a result."""

    tolerance_used: float
    """That as a part of what is allowed; 0 where bits are equal."""

    contract: str
    """`bits`, or `bound` if a result may be off."""

    moved: int
    held: int
    """Bytes, as of the run."""


def verify(work: Work, device: torch.device) -> Verdict:
    """Let the work make a step of `VERIFIED` elements, and compare.

    Raises:
        ResultError: a result is further off than it may be.
        ImportError: the work is of a package that is not installed.
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
    """Whether both have the same bits."""
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
    """The yardstick of bandwidth on tensors of `size` bytes: a copy on a GPU, on the CPU an addition in place.

    A CPU reads what it is about to write, so a copy would move a third more than it seems to.
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
    """What one step took, in seconds."""

    wall: float
    """From when its device comes to it until it is done."""

    cpu: float
    """Of work in all threads of this process: other programs hardly change it. On a GPU it is that of launching."""


class Clock(Protocol):
    """How long something takes on a device."""

    def sample(self, step: Callable[[], object]) -> Sample:
        """Take a step and return how long that took."""


class HostClock:
    """For what the host computes itself."""

    def sample(self, step: Callable[[], object]) -> Sample:
        """Take a step."""
        wall, cpu = perf_counter(), process_time()
        step()
        return Sample(perf_counter() - wall, process_time() - cpu)


_HEAD_START = 2_000_000
"""Cycles of a GPU that the host has to launch a step."""


class DeviceClock:
    """For what a GPU computes.

    Before each step a large buffer is read, so nothing of the step's tensors is left in the cache. (It is not written,
    for writing it back would take part of the step's bandwidth.) While the GPU reads, and then idles for about a
    millisecond, the host launches the step: the time of one kernel is that of the GPU alone. Of steps that take the
    host longer it has the gaps between them, which are there in training too.
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

    A run whose steps have taken more than `budget` seconds takes no more part. Samples number `i` of all are of one
    round.
    """
    for run in runs.values():
        for _ in range(WARM_UP):
            if clock.sample(run.step).wall > budget / _LEAST_ROUNDS:
                break
    taken: dict[str, list[Sample]] = {name: [] for name in runs}
    for turn in range(rounds):
        going = [name for name, samples in taken.items() if _goes_on(samples, turn, budget)]
        first = turn % max(1, len(going))
        for name in [*going[first:], *going[:first]]:
            taken[name].append(clock.sample(runs[name].step))
    return taken


def _goes_on(samples: Sequence[Sample], turn: int, budget: float) -> bool:
    within = turn < _LEAST_ROUNDS or sum(sample.wall for sample in samples) < budget
    return len(samples) == turn and within


def packed(held: Mapping[str, int], room: int) -> list[list[str]]:
    """Put names into groups, in their order, such that what each group holds fits into `room` bytes.

    A name that does not fit alone is in none.
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
