"""Seed bugs (mutants) into the library, one at a time, and report each bug that its test does not detect.

    python tools/mutate.py --check          # report the mutants that do not fit the sources
    python tools/mutate.py                  # run all mutants
    python tools/mutate.py --only 7 12-20   # run some mutants, by number

`tools/mutants.txt` lists the mutants. Each mutant has a file, a piece of its text, the replacement, and the test that
must fail. The text must occur exactly once in the file; all kinds of white space are equal. If the file does not have
the text, the script searches all sources, because code moves between files. A test is `"test_file"` or
`"test_file::test_name"`, without the folder of the file.

For each mutant the checkout is copied to a temporary folder (tracked and untracked files, but none that git ignores),
the text is replaced, and pytest runs the test in the copy. The mutant is killed if pytest fails or times out. Before
that, the tests of all mutants run without a mutant; if one of these tests fails, the exit status is 2. If a mutant
survives, the exit status is 1.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tools" / "mutants.txt"
TIMEOUT = 900.0  # seconds per mutant
_MARK = "SHARDLITE_MUTANT"  # name of an environment variable that all processes of a run have


@dataclass(frozen=True)
class Mutant:
    """A bug to seed: `text` of the file at `path` is replaced by `new`, and `test` must fail."""

    path: str
    text: str
    new: str
    test: str
    why: str
    """Effect of the bug."""

    def source(self, root: Path) -> tuple[Path, str]:
        """Return the file under `root` that has the text, and the mutated source of this file.

        Raises:
            ValueError: If the file does not exist, or does not have exactly one occurrence of the text.
        """
        pattern = re.compile(r"\s+".join(map(re.escape, self.text.split())))
        file = root / self.path
        source = file.read_text() if file.is_file() else ""
        found = list(pattern.finditer(source))
        if len(found) != 1:
            raise ValueError(f"{self.path}: {self.text!r} must occur once; it occurs {len(found)} times")
        return file, source[: found[0].start()] + self.new + source[found[0].end() :]

    def node(self, root: Path) -> str:
        """Return the node ID of the test for pytest, such as `"tests/grads/test_flags.py::test_name"`.

        Raises:
            ValueError: If the test does not exist.
        """
        stem, _, name = self.test.partition("::")
        files = list((root / "tests").rglob(f"{stem}.py"))
        if len(files) != 1 or f"def {name}" not in files[0].read_text():
            raise ValueError(f"{self.path}: {self.text!r}: there is no test {self.test}")
        return "::".join(filter(None, [files[0].relative_to(root).as_posix(), name]))


def read_table(path: Path = TABLE) -> list[Mutant]:
    """Return the mutants of a table. Each has four lines, of which the last three begin with `- `, `+ ` and `! `.

    Raises:
        ValueError: If a mutant does not have this format.
    """
    entry = re.compile(r"(\S+): (.+)\n- (.+)\n\+ ?(.*)\n! (\S+)")
    mutants = []
    for lines in path.read_text().strip().split("\n\n")[1:]:  # the first paragraph describes the table
        found = entry.fullmatch(lines)
        if found is None:
            raise ValueError(f"{path.name}: expected `FILE: WHY`, `- TEXT`, `+ NEW` and `! TEST`, got {lines!r}")
        file, why, text, new, test = found.groups()
        mutants.append(Mutant(file, text, new, test, why))
    return mutants


def check(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Return an error for each mutant that does not fit the sources, or whose test does not exist."""
    wrong = []
    for number, mutant in enumerate(mutants, 1):
        try:
            file, source = mutant.source(root)
            compile(source, str(file), "exec")
            mutant.node(root)
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{number:>3}  {error}")
    return wrong


def main(argv: Sequence[str] | None = None, root: Path = ROOT, mutants: Sequence[Mutant] | None = None) -> int:
    """Run the script; return its exit status."""
    options = _parser().parse_args(argv)
    mutants = read_table() if mutants is None else mutants
    if wrong := check(mutants, root):
        print(f"{len(wrong)} of {len(mutants)} mutants do not fit the sources:", *wrong, sep="\n")
        return 2
    if options.check:
        print(f"all {len(mutants)} mutants fit the sources")
        return 0
    chosen = _chosen(options.only, len(mutants))
    with tempfile.TemporaryDirectory(prefix="shardlite-mutants-") as folder:
        original = _snapshot(root, Path(folder, "original"))
        tests = sorted({mutants[number - 1].node(root) for number in chosen})
        failed, output = run(original, tests, len(tests) * options.timeout)
        if failed:
            print(f"the tests fail without a mutant:\n{output}")
            return 2
        alive = [number for number in chosen if not _killed(number, mutants[number - 1], original, options.timeout)]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants were killed; survivors: {alive or 'none'}")
    return int(bool(alive))


def _killed(number: int, mutant: Mutant, original: Path, timeout: float) -> bool:
    """Run the test of a mutant on a copy of the checkout, print a line, and return whether the test failed."""
    copy = original.with_name(f"mutant-{number}")
    shutil.copytree(original, copy, symlinks=True)
    file, source = mutant.source(copy)
    file.write_text(source)
    begin = time.monotonic()
    failed, _ = run(copy, [mutant.node(copy)], timeout)
    shutil.rmtree(copy)
    words = "killed" if failed else "SURVIVED"
    print(f"{number:>3}  {words}  {time.monotonic() - begin:5.1f} s  {mutant.path}: {mutant.why}", flush=True)
    return failed


def run(copy: Path, tests: Sequence[str], timeout: float) -> tuple[bool, str]:
    """Run tests in a copy of the checkout. Return whether they failed or timed out, and the output."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(copy), str(copy / "kernels")])
    with tempfile.TemporaryFile() as output:  # no pipe, because a process that outlives pytest would keep it open
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": path, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            failed = process.wait(timeout) != 0
        except subprocess.TimeoutExpired:
            failed = True
        finally:
            end_tree(process, mark)  # ranks may still wait for each other
        output.seek(0)
        return failed, output.read().decode(errors="replace")


def end_tree(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kill the process group of `process`, and on Linux all processes with `mark` in their environment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(100):  # processes that strays have started meanwhile are found in the next round
        strays = list(_marked(f"{_MARK}={mark}".encode()))
        if not strays:
            return
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(variable: bytes) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if variable in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)


def _snapshot(root: Path, folder: Path) -> Path:
    """Copy the files of the checkout that git does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
    for name in filter(None, dict.fromkeys(listed)):
        if os.path.lexists(root / name):  # a tracked file may have been deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
    return folder


def _chosen(only: Sequence[str], count: int) -> list[int]:
    numbers = set()
    for each in only or [f"1-{count}"]:
        first, _, last = each.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    if unknown := numbers - set(range(1, count + 1)):
        raise SystemExit(f"mutate: there are no mutants {sorted(unknown)}; there are 1 to {count}")
    return sorted(numbers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="report mutants that do not fit the sources; run nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="N", help="numbers of mutants, or ranges as 7-12")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, metavar="S", help=f"seconds per mutant ({TIMEOUT:g})")
    return parser


if __name__ == "__main__":
    # On SIGTERM, this handler raises KeyboardInterrupt, so that `finally` ends the commands.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
