"""Find the largest GPT that trains within a memory budget, with FSDP2 and with ShardLite's memory-saving options.

    python examples/largest_model.py --gigabytes 1
    python examples/largest_model.py --gigabytes 1 --ranks 2 --out bench/results

On a GPU the default budget is the free memory of the card, and a model fits if three steps finish without an
out-of-memory error of CUDA. On a CPU the budget limits the bytes in tensors at any time, also while the model is
built. Each trial runs in new processes, one per rank, so earlier trials leave no memory behind. All systems get the
same models, batch, dtypes and checkpointing. A trial counts only if its loss decreases. If a system raises, the table
shows its error.
"""

import argparse
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from largest_systems import BASE, BATCH, CONTEXT, FAMILY, SYSTEMS, TRAINING, Shape

from shardlite.cli.launch import environment_for, process_group
from shardlite.lab.compared.gpt import BYTE_VALUES
from shardlite.telemetry.meter import Meter

Row = dict[str, Any]

STEPS = 3


# ---- one trial, seen from a rank ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One system with a model of about `size` parameters, on ranks with a budget of `budget` bytes each."""

    system: str
    size: int
    budget: int


@dataclass(frozen=True)
class Outcome:
    """Result of a trial: the peak in bytes and the loss of each step, or an error other than running out of memory."""

    fits: bool = False
    peak: int = 0
    losses: Sequence[float] = ()
    error: str | None = None


class TooMuch(MemoryError):  # noqa: N818 (an answer)
    """Raised if tensors have more bytes than the budget."""


def run_rank(trial: Trial, folder: Path) -> None:
    """Run a trial as one of its ranks, and write the outcome to `folder`."""
    with process_group() as device:
        outcome = attempt(trial, device)
        unfinished = folder / f"{dist.get_rank()}"
        unfinished.write_text(json.dumps(asdict(outcome)))
        unfinished.rename(unfinished.with_suffix(".json"))
        if not outcome.fits:
            os._exit(1)  # without cleanup, because peers may wait for messages from this rank


def attempt(trial: Trial, device: torch.device) -> Outcome:
    """Train, and return the outcome. Exceptions become outcomes."""
    try:
        measure = on_gpu if device.type == "cuda" else on_cpu
        losses, peak = measure(trial, device)
        return judged(losses, peak)
    except Exception as error:
        return Outcome() if ran_out(error) else Outcome(error=described(error))


def train(trial: Trial, device: torch.device) -> list[float]:
    """Build the model and take `STEPS` steps on one batch. Return the loss before each step."""
    torch.manual_seed(dist.get_rank())  # each FSDP2 rank draws the initial values of its own shards
    model, optimizer = SYSTEMS[trial.system](Shape.near(trial.size).on_meta(), device)
    chance = torch.Generator().manual_seed(1 + dist.get_rank())
    text = torch.randint(BYTE_VALUES, (BATCH, CONTEXT + 1), generator=chance).to(device)
    losses = []
    for _ in range(STEPS):
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_gpu(trial: Trial, device: torch.device) -> tuple[list[float], int]:
    """Return the losses and the peak of bytes that PyTorch allocated. PyTorch may allocate at most the budget."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, trial.budget / total), device)
    return train(trial, device), torch.cuda.max_memory_allocated(device)


def on_cpu(trial: Trial, device: torch.device) -> tuple[list[float], int]:
    """Return the losses and the peak of bytes in tensors. Stop as soon as the peak exceeds the budget."""

    def check() -> None:
        if meter.peak > trial.budget:
            raise TooMuch(f"tensors take {meter.peak} bytes, but the budget is {trial.budget}")

    with Meter(on_peak=check) as meter:
        losses = train(trial, device)
    return losses, meter.peak


def judged(losses: Sequence[float], peak: int) -> Outcome:
    """Return the outcome of a trial. A trial whose loss does not decrease is an error."""
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        return Outcome(peak=peak, error=f"the loss does not fall: {', '.join(f'{loss:.4f}' for loss in losses)}")
    return Outcome(fits=True, peak=peak, losses=losses)


def ran_out(error: BaseException | None) -> bool:
    """Return whether the error, or an exception that caused it, means out of memory. NCCL has its own exception."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | TooMuch) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def described(error: Exception) -> str:
    """Return the error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# ---- the search -----------------------------------------------------------------------------------------------------


def bisect(fits: Callable[[int], bool], first: int, most: int, within: float) -> tuple[int, int]:
    """Return the largest size that was found to fit, and the smallest size that was found not to fit.

    The second size is the next integer, or at most `1 + within` times the first. The search starts at `first`, or at a
    smaller size if `first` does not fit. The caller knows that `most` does not fit. Each further trial uses the
    geometric mean of the two sizes.

    Raises:
        ValueError: If no size fits.
    """
    low, high = first, most
    while not fits(low):
        low, high = low // 4, low
        if low == 0:
            raise ValueError("not even the smallest model fits")
    while high > max(low + 1, low * (1 + within)):
        middle = max(low + 1, math.isqrt(low * high))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def largest(system: str, budget: int, ranks: int, within: float, run: Callable[[Trial, int], Outcome]) -> Row:
    """Search for the largest model of one system, and return its row. An error in a trial ends the search."""
    outcomes: dict[int, Outcome] = {}

    def fits(size: int) -> bool:
        outcome = outcomes[size] = run(Trial(system, size, budget), ranks)
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
        return outcome.fits

    try:
        # Weights, gradients and two moments in fp32 take 16 bytes per parameter; weights in bf16 alone take 2.
        low, high = bisect(fits, first=ranks * budget // 32, most=ranks * budget // 2, within=within)
    except (RuntimeError, ValueError) as error:
        return {"system": system, "parameters": None, "trials": len(outcomes), "error": str(error)}
    parameters, peak = Shape.near(low).parameters(), outcomes[low].peak
    return {
        "system": system,
        "parameters": parameters,
        "too_many_parameters": Shape.near(high).parameters(),
        "peak_bytes": peak,
        "bytes_per_parameter": round(peak * ranks / parameters, 3),  # on all ranks together
        **asdict(Shape.near(low)),
        "losses": outcomes[low].losses,
        "trials": len(outcomes),
        "error": None,
    }


def run_trial(trial: Trial, ranks: int) -> Outcome:
    """Run a trial in new processes. If one of them fails, end the other processes, which may wait for it."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--trial", json.dumps(asdict(trial)), "--out", folder]
        shared = environment_for(ranks) | _meeting_point(ranks)
        shared.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # avoids fragmentation of a full card
        shared.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads would take cores from other processes
        processes = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            while None in (ended := [process.poll() for process in processes]) and not any(ended):
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outcomes = [Outcome(**json.loads(file.read_text())) for file in Path(folder).glob("*.json")]
    return _worst(outcomes, [process.returncode for process in processes])


def _worst(outcomes: Sequence[Outcome], ended: Sequence[int]) -> Outcome:
    """Return one outcome for all ranks. Running out of memory has precedence, because it causes other errors."""
    bad = [outcome for outcome in outcomes if not outcome.fits]
    if bad:
        return min(bad, key=lambda outcome: outcome.error is not None)
    if len(outcomes) < len(ended) or any(ended):
        return Outcome(error=f"a rank ended without a result: exit statuses {list(ended)}")
    return max(outcomes, key=lambda outcome: outcome.peak)


def _meeting_point(ranks: int) -> dict[str, str]:
    """Return the environment variables that a launcher sets on all ranks."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


# ---- rows and the table ---------------------------------------------------------------------------------------------

_COLUMNS: dict[str, Callable[[Row, Row], str]] = {
    "system": lambda row, _: row["system"],
    "parameters": lambda row, _: _millions(row["parameters"]),
    "did not fit": lambda row, _: _millions(row["too_many_parameters"]),
    "bytes per parameter": lambda row, _: f"{row['bytes_per_parameter']:.2f}",
    "times FSDP2's": lambda row, base: f"{row['parameters'] / base['parameters']:.2f}" if base["parameters"] else "",
}


def render(rows: Sequence[Row]) -> str:
    """Return a Markdown table of the rows of one run, with a heading that names models, training and machine."""
    base = next((row for row in rows if row["system"] == BASE), {"parameters": None})
    rule = ["---", *["---:"] * (len(_COLUMNS) - 1)]
    lines = [list(_COLUMNS), rule, *(_cells(row, base) for row in rows)]
    return f"{_heading(rows[0])}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row, base: Row) -> list[str]:
    if row["error"] is None:
        return [cell(row, base) for cell in _COLUMNS.values()]
    return [row["system"], row["error"].replace("|", "/"), *[""] * (len(_COLUMNS) - 2)]


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 1e6 else f"{count:,}"


def _heading(row: Row) -> str:
    return (
        f"The largest model that takes {row['steps']} steps in {row['budget_bytes'] / 1e9:.3g} GB per rank, within "
        f"{100 * row['within']:g} %; {row['words']}; {row['training']}; {row['ranks']} rank{'s' * (row['ranks'] > 1)}; "
        f"{row['machine']}, torch {row['torch']}, {row['date']}."
    )


def common(options: argparse.Namespace, budget: int, device: str) -> Row:
    """Return the keys that all rows of a run share."""
    return {
        "bench": "largest",
        "words": FAMILY,
        "training": TRAINING,
        "steps": STEPS,
        "budget_bytes": budget,
        "within": options.within,
        "ranks": options.ranks,
        "machine": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def machine() -> str:
    """Return the name of the CPU, from Linux if possible, and its number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def card(ranks: int) -> tuple[str, int]:
    """Return the name of the GPUs and the smallest number of free bytes, found by a process that then ends.

    Raises:
        ValueError: If ranks would share a GPU.
    """
    if torch.cuda.device_count() < ranks:
        raise ValueError(f"each rank needs a GPU: got {ranks} ranks and {torch.cuda.device_count()} GPUs")
    ask = f"import torch.cuda as c; print(c.get_device_name(), min(c.mem_get_info(i)[0] for i in range({ranks})))"
    name, _, free = subprocess.check_output([sys.executable, "-c", ask], text=True).strip().rpartition(" ")
    return name, int(free)


def main() -> None:
    """Search with each system in turn, or run as one rank of a trial."""
    options = parse()
    if options.trial is not None:
        run_rank(options.trial, options.out)
        return
    device, budget = card(options.ranks) if torch.cuda.is_available() else (machine(), None)
    if options.gigabytes is not None:
        budget = int(options.gigabytes * 1e9)
    if budget is None:
        raise SystemExit("without a GPU, give the budget per rank: --gigabytes 1")
    shared = common(options, budget, device)
    rows = [shared | largest(system, budget, options.ranks, options.within, told) for system in SYSTEMS]
    print(f"\n{render(rows)}", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "cpu" if not torch.cuda.is_available() else device.lower().replace(" ", "-")
        (options.out / f"largest-{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def told(trial: Trial, ranks: int) -> Outcome:
    """Run a trial, print its result, and return its outcome."""
    start = time.perf_counter()
    outcome = run_trial(trial, ranks)
    result = outcome.error or (f"fits, {outcome.peak / 1e9:.3f} GB at the peak" if outcome.fits else "does not fit")
    parameters = _millions(Shape.near(trial.size).parameters())
    print(f"{trial.system}: {parameters} {result} ({time.perf_counter() - start:.0f} s)", flush=True)
    return outcome


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gigabytes", type=float, help="budget per rank in 1e9 bytes; by default the free memory of its GPU"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine (%(default)s)")
    parser.add_argument("--within", type=float, default=0.02, help="relative precision of the size (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the rows, as JSON lines")
    parser.add_argument("--trial", type=lambda text: Trial(**json.loads(text)), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
