"""Start the ranks of each system, one system after the other, and print the rows that they measure.

Each rank runs the same command line, plus the name of one system and the path of a file for the row. The row of a
system that fails has an `error`.
"""

import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardlite.cli import environment_for, progress, run_agent, torchrun
from shardlite.lab.compared.systems import MEASURED as SYSTEMS
from shardlite.lab.compared.systems import System, fsdp2_system, shardlite_system
from shardlite.lab.memory import OWN
from shardlite.lab.memory.plots import paint, paint_timeline
from shardlite.lab.memory.predict import Predictor
from shardlite.lab.memory.recorder import Row, compared, measure
from shardlite.lab.memory.text import by_purpose, heading, render
from shardlite.lab.memory.timeline import Timeline, record
from shardlite.lab.plan.run import setting_of
from shardlite.lab.plan.source import find_source
from shardlite.plan import Planner, Setting, Source

RETURNS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
"""Environment variables that make malloc map each block above 256 KiB separately, so that `free` unmaps the block."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
_TIMEOUT = timedelta(minutes=10)
_SIGNALLED = 128  # higher exit statuses mean that a signal ended the process
_LINES = 3
"""Lines of standard error to show if no rank wrote an error."""


def run_all(options: Namespace, arguments: Sequence[str]) -> int:
    """Run a command line: start ranks, print tables, write files. Return 1 if a system failed.

    Args:
        options: the checked options.
        arguments: the whole command line, which is passed on to the ranks.

    Raises:
        ValueError: an option has an invalid value.
        ModuleNotFoundError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    source, setting, systems = _parse(options)
    program = Program(module="shardlite", arguments=arguments)
    if options.plots is not None or options.timeline is not None:
        import matplotlib  # noqa: F401  # optional: if missing, this must raise before any measurement
    if options.timeline is not None:
        setting = replace(setting, world_size=options.ranks[0])
        return _draw_timeline(source, setting, program, options.timeline)
    for name in options.systems:
        if name in systems and systems[name].missing:
            raise ValueError(f"--systems {name!r}: {systems[name].missing}")
    rows = []
    for measured in measure_all(_named(source), program, systems, sorted(set(options.ranks))):
        rows += measured
        print(render(measured), end="\n\n", flush=True)
        if options.json is not None:  # write the file each time, because a long run may be interrupted
            options.json.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if options.json is not None:
        print(f"wrote {options.json}")
    if options.plots is not None:
        print(*(f"wrote {path}" for path in paint(rows, options.plots)), sep="\n")
    return int(any("error" in row for row in rows))


def run_rank(options: Namespace) -> int:
    """Measure the system that `--systems` names, as one of the ranks that `run_all` has started."""

    def work(group: dist.ProcessGroup) -> Row:
        source, setting, systems = _parse(options)
        system = systems[options.systems[0]]
        if options.timeline is None:
            return measure(_named(source), system, group, process=options.process, steps=options.steps)
        if options.systems[0] == "fsdp2":
            system = fsdp2_system(setting.precision)
        return asdict(record(source, system, group))

    return be_rank(work, options.row)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The command of each rank: `python -m MODULE ARGUMENTS --systems SYSTEM --row FILE`."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: RETURNS)
    facts: Row = field(default_factory=lambda: {"malloc": "returns", "busy": 0})
    """Entries of every row. They describe how the program was run."""

    def measure(self, system: str, ranks: int) -> Row:
        """Run one system, and return the row of its rank 0, or a row with only `error`.

        Raises:
            SystemExit: this process received a signal to terminate, and passed the signal on to the ranks.
        """
        with tempfile.TemporaryDirectory() as folder:
            file, log = Path(folder) / "row.json", Path(folder) / "stderr"
            arguments = [*self.arguments, "--systems", system, "--row", str(file)]
            environment = environment_for(ranks, {**os.environ, **_ENVIRONMENT, **self.environment})
            with log.open("w") as output:
                status = run_agent(torchrun(ranks, arguments, module=self.module), environment, output)
            if status > _SIGNALLED:
                raise SystemExit(status)
            if file.exists():
                row: Row = json.loads(file.read_text())
                return row
            return {"error": _cause(status, log.read_text())}


def be_rank(work: Callable[[dist.ProcessGroup], Row], file: Path) -> int:
    """Call `work` as one of the ranks of a `Program`, and return the exit status.

    Rank 0 writes the row that `work` returns. A rank whose `work` raises writes the error instead.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    try:
        row = work(group)
    except Exception as error:
        _write({"error": f"{type(error).__name__}: {error}"}, file)
        raise
    if group.rank() == 0:
        _write(row, file)
    dist.destroy_process_group()
    return 0


def measure_all(
    source: Source, program: Program, systems: Mapping[str, System], ranks: Sequence[int]
) -> Iterator[list[Row]]:
    """Measure all systems at each number of ranks, and yield a list of rows for each number.

    Args:
        source: the model, for predictions and for the rows of systems that fail.
        program: the program that measures a system with the same model.
        systems: the systems by name. A system whose package is not installed is skipped, and its name is printed to
            standard error.
        ranks: numbers of processes on this machine.
    """
    known = _prediction(source)
    for name, system in systems.items():
        if system.missing:
            say(f"{name} is left out: {system.missing}")
    present = {name: system for name, system in systems.items() if not system.missing}
    for world_size in ranks:
        rows = []
        for i, (name, system) in enumerate(present.items(), 1):
            start = time.monotonic()
            facts = {"bench": "footprint", "model": source.name, "ranks": world_size, "system": name}
            row = {**facts, **program.measure(name, world_size), **program.facts, **known(name, system, world_size)}
            rows.append(row)
            took = time.monotonic() - start
            say(f"[{i}/{len(present)}, {world_size} ranks] {name}: {_result(row)}, {took:.0f} s")
        yield compared(rows)


def _parse(options: Namespace) -> tuple[Source, Setting, dict[str, System]]:
    """Return the model, ShardLite's setting for one rank, and the systems of a command line.

    Raises:
        ValueError: an option has an invalid value.
    """
    setting = replace(setting_of(options), stage=options.stage, on_gpu=False)
    named = list(SYSTEMS) if options.systems == ["all"] else options.systems
    if setting != Setting(on_gpu=False):
        named = [*named, OWN]
    systems = {name: shardlite_system(setting) if name == OWN else SYSTEMS[name] for name in named}
    return find_source(options.model, options.batch, options.context, options.inputs), setting, systems


def _named(source: Source) -> Source:
    """Return the source with a description (`words`) that begins with the name of the model, as in rows."""
    return replace(source, words=f"{source.name}, {source.words.removesuffix(' per rank')}")


def _draw_timeline(source: Source, setting: Setting, program: Program, picture: Path) -> int:
    """Record a step of ShardLite and of FSDP2, print a table, and draw both steps. Return 1 if a system failed."""
    plan = Planner(source, progress=progress).plan(setting)  # raises errors before ranks are started
    timelines = []
    for name in (OWN, "fsdp2"):
        progress(f"{name} trains {heading(source, setting)}")
        row = program.measure(name, setting.world_size)
        if "error" in row:
            print(f"{name} failed: {row['error']}")
            return 1
        timelines.append(Timeline.of(row))
    ours, theirs = timelines
    print(by_purpose(source, plan, ours, theirs), flush=True)
    paint_timeline(source, setting, ours, theirs, picture)
    print(f"wrote {picture}", flush=True)
    return 0


def _prediction(source: Source) -> Callable[[str, System, int], Row]:
    """Return a function that predicts the bytes of a system. For an untraceable model, it predicts nothing."""
    try:
        predictor = Predictor(source, progress=say)
    except ValueError as error:
        say(f"nothing is predicted: {error}")
        return lambda name, system, ranks: {}

    def known(name: str, system: System, ranks: int) -> Row:
        try:
            bounds = predictor.bounds(name, system, ranks)
        except ValueError as error:
            say(f"{name} is not predicted: {error}")
            return {}
        return {} if bounds is None else {"predicted_least_bytes": bounds[0], "predicted_bytes": bounds[1]}

    return known


def _write(row: Row, file: Path) -> None:
    """Write a row, unless another rank has written an error."""
    if not file.exists():
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(row))
        temporary.replace(file)


def _result(row: Row) -> str:
    if "error" in row:
        return f"failed, {row['error'].splitlines()[0]}"
    return f"{row['pss_bytes' if 'pss_bytes' in row else 'tensor_bytes'] / 2**20:.0f} MiB"


def _cause(status: int, log: str) -> str:
    """Return why the ranks ended without writing a row."""
    if "SIGKILL" in log:
        return "a rank was killed (SIGKILL), as Linux does when memory runs out"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return " | ".join([f"the ranks ended with status {status}", *lines[-_LINES:]])


def say(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)
