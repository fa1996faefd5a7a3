"""Seed mutants into the library and report which of them the tests notice.

    python tools/mutate.py --list
    python tools/mutate.py --out rows.jsonl
    python tools/mutate.py --only 7 12-20 --command "python -m pytest tests/grads/test_clip.py"
    python tools/mutate.py --tests-from HEAD~50 --command "python -m pytest" --out old.jsonl

A mutant is a record of `tools/mutants.py`: a snippet of a source file and what stands in its place. For each mutant the
checkout is copied to a temporary folder (tracked files, and untracked ones that git does not ignore, as they are now),
the snippet is replaced, and the command runs there. The mutant is killed if the command fails or runs out of time, and
has survived if the command is green.

The command runs with this interpreter and finds the copy first. To pytest, `-x -q` is passed, and an order: test files
named after the mutated module come first, then those that the table names, those that import the module, and the parity
tests. The order only saves time: every survivor has passed all tests that the command selects.

Before the mutants the command runs on a copy without a mutant, the control. If that fails, kills mean nothing, and the
script stops with exit status 2. Otherwise the status is 0, unless `--fail-under` says something else.

Two selections of tests are compared by two runs with one table: `--tests-from` takes `tests/` from another revision.
"""

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tools" / "mutants.py"
COMMAND = 'python -m pytest -m "not slow" -n 2 --dist loadgroup'
TIMEOUT = 3600.0  # seconds per mutant
TAIL = 30  # lines of output that a row keeps
OWN_TEST = "tests/project/test_mutate.py"  # checks the table against the sources, so it would kill every mutant
_MARK = "SHARDLITE_MUTANT"  # in the environment of all processes of a run, and of theirs
_FIRST = "SHARDLITE_MUTANT_FIRST"  # test files in the order in which they are to run


@dataclass(frozen=True)
class Mutant:
    """A change of one source file. `number` is its place in the table, from 1; 0 is the control, without a change."""

    number: int
    path: str
    kind: str
    snippet: str
    replacement: str
    why: str
    first: tuple[str, ...] = ()  # names of test files that are likely to notice it

    @property
    def key(self) -> str:
        """What the mutant is called in rows: it stays when the table grows."""
        return f"{zlib.crc32(repr((self.path, self.snippet, self.replacement)).encode()):08x}"

    @property
    def change(self) -> str:
        """The change in one line."""
        before, after = (
            " / ".join(line.strip() for line in text.strip().splitlines()) for text in (self.snippet, self.replacement)
        )
        return f"{before}  ->  {after or '(nothing)'}"

    def line(self, root: Path) -> int:
        """The line of the snippet in the checkout at `root`."""
        source = (root / self.path).read_text()
        return source.count("\n", 0, source.index(self.snippet)) + 1

    def mutated(self, root: Path) -> str:
        """The mutated source.

        Raises:
            ValueError: the file does not exist, or the snippet does not occur exactly once in it.
        """
        if not (root / self.path).is_file():
            raise ValueError(f"mutant {self.number}: there is no {self.path}")
        source = (root / self.path).read_text()
        if (count := source.count(self.snippet)) != 1:
            raise ValueError(f"mutant {self.number}: {self.snippet!r} occurs {count} times in {self.path}, expected 1")
        return source.replace(self.snippet, self.replacement)


CONTROL = Mutant(0, "", "control", "", "", "no change: the command must be green")


def read_table(path: Path = TABLE) -> list[Mutant]:
    """Read the list `MUTANTS` of `path`, a Python file, and the test files that come `FIRST`, by module."""
    table = runpy.run_path(str(path))
    return [
        Mutant(number, path, kind, snippet, replacement, why, table["FIRST"].get(path, ()))
        for number, (path, kind, snippet, replacement, why) in enumerate(table["MUTANTS"], start=1)
    ]


def check(mutants: Iterable[Mutant], root: Path) -> list[str]:
    """Return what is wrong with each mutant that does not fit the sources at `root`."""
    wrong = []
    for mutant in mutants:
        try:
            mutant.mutated(root)
        except ValueError as error:
            wrong.append(str(error))
    return wrong


@dataclass(frozen=True)
class Row:
    """What became of a mutant. `by` is the first test that failed, `tail` the end of the output if it was killed."""

    key: str
    number: int
    path: str
    kind: str
    change: str
    result: str  # "killed", "survived" or "timeout"; "green" or "red" for the control
    seconds: float
    by: str
    command: str
    tests_from: str
    tail: str

    @property
    def killed(self) -> bool:
        """Whether the tests have noticed the mutant."""
        return self.result in ("killed", "timeout")

    def words(self) -> str:
        """The row in one line."""
        by = f"  by {self.by}" if self.by else ""
        return f"{self.number:>4}  {self.result:<8} {self.seconds:>7.1f} s  {self.path}  {self.change}{by}"


def main(argv: Sequence[str] | None = None, root: Path = ROOT, table: Path = TABLE) -> int:
    """Run the script on the checkout at `root` with the mutants of `table`; return its exit status."""
    options = _parser().parse_args(argv)
    mutants = read_table(table)
    if wrong := check(mutants, root):
        print("the table does not fit the sources:", *wrong, sep="\n  ", file=sys.stderr)
        return 2
    if options.list:
        for each in mutants:
            print(f"{each.number:>4}  {each.kind:<10}  {each.path}:{each.line(root)}  {each.change}\n      {each.why}")
        return 0
    chosen = _chosen(options.only, mutants)
    rows = _kept_rows(options.out, options.command, options.tests_from)

    def take(row: Row) -> None:
        rows[row.key] = row
        print(row.words(), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                print(json.dumps(asdict(row)), file=file)

    with tempfile.TemporaryDirectory(prefix="shardlite-mutants-") as folder:
        runner = Runner(root, Path(folder), options.command, options.timeout, options.tests_from)
        try:
            if not options.no_control and CONTROL.key not in rows:
                run_all(runner, [CONTROL], 1, take)
                if rows[CONTROL.key].result == "red":
                    print(f"the command fails without a mutant:\n{rows[CONTROL.key].tail}", file=sys.stderr)
                    return 2
            run_all(runner, [each for each in chosen if each.key not in rows], options.jobs, take)
        except KeyboardInterrupt:
            print("interrupted: run it again with the same --out to go on", file=sys.stderr)
            return 130
    found = [rows[each.key] for each in chosen]
    print(summary(found))
    share = 100 * sum(row.killed for row in found) / len(found)
    return int(options.fail_under is not None and share < options.fail_under)


def run_all(runner: "Runner", mutants: Iterable[Mutant], jobs: int, take: Callable[[Row], None]) -> None:
    """Run the mutants, `jobs` at a time, and call `take` with each row as it comes."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(runner.run, each) for each in mutants]):
            if (row := future.result()) is not None:
                take(row)
    except BaseException:
        runner.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def summary(rows: Sequence[Row]) -> str:
    """Count by kind and by module, then list the survivors."""
    lines: list[str] = []
    for title, column in (("kind", "kind"), ("module", "path")):
        names = sorted({getattr(row, column) for row in rows})
        width = max(len(name) for name in (*names, title))
        lines += ["", f"{title:<{width}}  mutants  killed  timeout  survived"]
        for name in (*names, "all"):
            results = [row.result for row in rows if name in ("all", getattr(row, column))]
            killed, late, alive = (results.count(each) for each in ("killed", "timeout", "survived"))
            lines.append(f"{name:<{width}}  {len(results):>7}  {killed:>6}  {late:>7}  {alive:>8}")
    survivors = [row for row in rows if not row.killed]
    lines += ["", "survivors:" if survivors else "no survivors", *(row.words() for row in survivors)]
    return "\n".join(lines)


class Runner:
    """Runs the command on copies of the checkout at `root` as it was at first, each with one mutant."""

    def __init__(self, root: Path, folder: Path, command: str, timeout: float, tests_from: str) -> None:
        self._folder = folder
        self._words = shlex.split(command)
        self._command = command
        self._timeout = timeout
        self._tests_from = tests_from
        self._original = _snapshot(root, folder / "original", tests_from)
        self._lock = threading.Lock()
        self._running: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
        self._stopped = False

    def run(self, mutant: Mutant) -> Row | None:
        """Run the command on a copy with `mutant`; return what became of it, or `None` after `stop()`."""
        copy = self._folder / f"copy-{mutant.number}"
        try:
            shutil.copytree(self._original, copy, symlinks=True)
            first: list[str] = []
            if mutant is not CONTROL:
                (copy / mutant.path).write_text(mutant.mutated(copy))
                first = relevant(copy, mutant.path, mutant.first)
            begin = time.monotonic()
            status, output = self._call(copy, first)
            seconds = time.monotonic() - begin
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        if self._stopped:
            return None
        green, red, late = ("green", "red", "red") if mutant is CONTROL else ("survived", "killed", "timeout")
        return Row(
            key=mutant.key,
            number=mutant.number,
            path=mutant.path,
            kind=mutant.kind,
            change=mutant.change if mutant is not CONTROL else mutant.why,
            result=late if status is None else red if status else green,
            seconds=round(seconds, 1),
            by=_first_failure(output),
            command=self._command,
            tests_from=self._tests_from,
            tail="" if status == 0 else "\n".join(output.splitlines()[-TAIL:]),
        )

    def stop(self) -> None:
        """End all commands that run, with all their processes."""
        with self._lock:
            self._stopped = True
            running = list(self._running.values())
        for process, mark in running:
            end_tree(process, mark)

    def _call(self, copy: Path, first: Sequence[str]) -> tuple[int | None, str]:
        """Run the command in `copy`; return its exit status, `None` at a timeout, and what it has printed."""
        mark = uuid.uuid4().hex
        words = [sys.executable if each in ("python", "python3") else each for each in self._words]
        if "pytest" in words:
            words += ["-p", Path(__file__).stem, "-x", "-q"]
        found_first = [copy, copy / "kernels", Path(__file__).parent]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*map(str, found_first), *filter(None, [os.environ.get("PYTHONPATH")])]),
            _MARK: mark,
            _FIRST: os.pathsep.join(first),
        }
        with tempfile.TemporaryFile() as output:  # no pipe: a process that outlives the command would keep it open
            with self._lock:
                if self._stopped:
                    return None, ""
                process = subprocess.Popen(
                    words,
                    cwd=copy,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running[process.pid] = process, mark
            try:
                status = process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_tree(process, mark)  # also after a failure: ranks may still wait for each other
                with self._lock:
                    del self._running[process.pid]
            output.seek(0)
            return status, output.read().decode(errors="replace")


def end_tree(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kill the process group of `process` and, on Linux, what has left it: all with `mark` in their environment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(100):
        strays = list(_marked(f"{_MARK}={mark}".encode()))
        if not strays:
            return
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # until they are gone; what they have started meanwhile is found next


def _marked(variable: bytes) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it is gone, or of another user
            if variable in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)


def relevant(root: Path, path: str, hints: Sequence[str] = ()) -> list[str]:
    """Return the test files at `root` that are likely to notice a change of the module at `path`, likeliest first.

    These are the file named after the module, those that `hints` names, those that import the module or have its name
    in theirs, and the parity tests.
    """
    module = Path(path).stem
    files = {each.relative_to(root).as_posix(): each for each in sorted(root.glob("tests/**/test_*.py"))}
    imports = re.compile(rf"^\s*(?:from|import) [\w.]*\.{module}\b|^\s*from [\w.]* import (?:.*\W)?{module}\b", re.M)
    ranks = [
        [name for name, file in files.items() if file.stem == f"test_{module}"],
        [name for hint in hints for name, file in files.items() if file.stem == hint],
        [name for name, file in files.items() if imports.search(file.read_text())],
        [name for name, file in files.items() if module in file.stem.split("_")],
        [name for name, file in files.items() if file.stem == "test_parity"],
    ]
    return list(dict.fromkeys(chain(*ranks)))


def pytest_configure(config: Any) -> None:
    """Have pytest-xdist hand tests out in their order. As all `pytest_` functions here: for pytest in a copy."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Move the tests of the files that come first to the front."""
    first = {name: place for place, name in enumerate(os.environ.get(_FIRST, "").split(os.pathsep))}
    items.sort(key=lambda item: first.get(item.path.relative_to(config.rootpath).as_posix(), len(first)))


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="N", help="numbers of mutants, or ranges as 7-12")
    parser.add_argument("--command", default=COMMAND, help=f"what has to notice mutants ({COMMAND})")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append a row per mutant; skip those it has")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (1)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help=f"seconds per mutant ({TIMEOUT:g}); then it is killed",
    )
    parser.add_argument("--tests-from", default="", metavar="REV", help="take tests/ from this git revision")
    parser.add_argument("--no-control", action="store_true", help="do not run the command without a mutant first")
    parser.add_argument("--fail-under", type=float, metavar="K", help="exit status 1 if less than K %% are killed")
    return parser


def _chosen(only: Sequence[str], mutants: Sequence[Mutant]) -> list[Mutant]:
    numbers: set[int] = set()
    for each in only:
        first, _, last = each.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    if unknown := numbers - {mutant.number for mutant in mutants}:
        raise SystemExit(f"mutate: there are no mutants {sorted(unknown)}; there are 1 to {len(mutants)}")
    return [mutant for mutant in mutants if not numbers or mutant.number in numbers]


def _kept_rows(path: Path | None, command: str, tests_from: str) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    if any((row.command, row.tests_from) != (command, tests_from) for row in rows):
        raise SystemExit(f"mutate: {path} has rows of another command or revision: give another file")
    return {row.key: row for row in rows if row.result != "red"}


def _snapshot(root: Path, folder: Path, tests_from: str) -> Path:
    """Copy the files of the checkout that git does not ignore, as they are now, but with `tests/` of that revision."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    for name in filter(None, dict.fromkeys(listed)):
        if os.path.lexists(root / name):  # else it is tracked, but was deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
    if tests_from:
        shutil.rmtree(folder / "tests", ignore_errors=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=_git(root, "archive", tests_from, "tests"), check=True)
    (folder / OWN_TEST).unlink(missing_ok=True)
    return folder


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *arguments], stdout=subprocess.PIPE, check=True).stdout


def _first_failure(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
    return "" if found is None else found[1]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # a signal that ends the script ends its commands, too
    sys.exit(main())
