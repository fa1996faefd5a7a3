"""Build a wheel and try it in clean environments at both ends of the supported range: `make check-range`.

Each environment gets the wheel and no checkout. Tests of the checkout then run with that environment's PyTorch.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/project/test_imports.py", "tests/model/test_parity.py", "tests/optim", "tests/weights", "tests/grads")
PROGRAM = """
import shardlite
from importlib.metadata import version
assert version("shardlite") == shardlite.__version__
for name in shardlite.__all__:
    getattr(shardlite, name)
print("shardlite", shardlite.__version__, "from", shardlite.__file__)
"""


def oldest_torch() -> str:
    """Return the requirement for the oldest torch that `pyproject.toml` allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(each.replace(">=", "==") for each in project["dependencies"] if each.startswith("torch")) + ".0"


def check(python: str, torch: str, wheel: Path, folder: Path) -> None:
    """Install `wheel` beside `torch` into a new environment, and run the command, a twin and the tests."""
    run(python, "-m", "venv", "--clear", str(folder))
    inside, commands = str(folder / "bin" / "python"), folder / "bin"
    run(inside, "-m", "pip", "install", "-q", torch, f"{wheel}[demo]", "pytest>=9,<9.2", "pytest-xdist>=3.6")
    run(inside, "-c", PROGRAM, cwd=folder)
    run(str(commands / "shardlite"), "verify", "--ranks", "2", cwd=folder)
    run(inside, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-m", "not slow", *TESTS)


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command without the checkout on its path. Raise `CalledProcessError` if it fails."""
    print("$", *command, file=sys.stderr, flush=True)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=cwd, env=outside, check=True)


def main() -> int:
    """Check the oldest and the newest Python and torch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oldest", default="python3.11", help="command of the oldest Python (%(default)s)")
    parser.add_argument("--newest", default="python3.13", help="command of the newest Python (%(default)s)")
    parser.add_argument("--home", type=Path, default=ROOT / ".venv-range", help="folder of environments (%(default)s)")
    options = parser.parse_args()
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(options.home), str(ROOT))
    wheel = max(options.home.glob("shardlite-*.whl"), key=lambda path: path.stat().st_mtime)
    check(options.oldest, oldest_torch(), wheel, options.home / "oldest")
    check(options.newest, "torch", wheel, options.home / "newest")  # the newest of the index
    return 0


if __name__ == "__main__":
    sys.exit(main())
