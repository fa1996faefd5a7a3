"""Wrong usage of the command line is one line: the option, what was got, what is allowed, where there is more."""

import pytest

from shardlite.apps import launch
from shardlite.apps.cli import COMMANDS, main

NAMES = [add.__name__.removeprefix("add_") for add in COMMANDS]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "shardlite: error: the following arguments are required: COMMAND (see shardlite --help)"),
        (["--frob"], "COMMAND (see shardlite --help)"),
        (["frob"], "argument COMMAND: invalid choice: 'frob' (choose from"),
        (["footprint"], "shardlite: error: there is no command footprint: use shardlite memory"),
        (["train", "--steps", "x"], "shardlite train: error: argument --steps: invalid int value: 'x'"),
        (["train", "--stage", "7"], "argument --stage: invalid choice: 7 (choose from"),
        (["train", "--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["train", "--steps", "0"], "steps must be positive, got 0"),
        (["train", "--lr", "nan"], "lr must be positive, got nan"),
        (["train", "--seed", "-1"], "seed must not be negative, got -1"),
        (["train", "--size", "tiny", "--heads", "5"], "multiple of twice the heads: width 64, heads 5"),
        (["train", "--data", "/no/such/file"], "/no/such/file does not exist: give a text file or a folder"),
        (["train", "--out", __file__], "File exists"),
        (["train", "--step"], "expected one argument (see shardlite train --help)"),
        (["ring", "--algorithm", "line"], "argument --algorithm: invalid choice: 'line' (choose from"),
        (["ring", "--ranks", "65"], "--ranks is 65; pictures are made for 1 to 64 ranks (see shardlite ring --help)"),
        (["plan"], "the following arguments are required: --model (see shardlite plan --help)"),
        (["plan", "--model", "frob"], "--model 'frob' is no preset, no file and no module:name; presets are gpt2,"),
    ],
)
def test_wrong_usage_is_one_line_and_starts_no_rank(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(launch, "launch", None)
    assert words in refusal(capsys, *arguments)


@pytest.mark.parametrize("name", NAMES)
def test_each_command_refuses_what_it_does_not_know(capsys, name):
    model = ["--model", "gpt2"] if name in ("plan", "memory") else []
    line = refusal(capsys, name, *model, *["a", "b"][: 2 * (name in ("export", "import"))], "--frob")
    assert line.startswith(f"shardlite {name}: error: ")
    assert line.endswith(f"(see shardlite {name} --help)")
