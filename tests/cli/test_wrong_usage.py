"""Wrong usage prints one line: the option, its value, the allowed values, and where to read more."""

import pytest

from shardlite.cli import launch, main
from shardlite.cli.options import COMMANDS

PLAN = ["plan", "--model", "demo-tiny", "--batch", "2"]
OWN = "tests.lab.test_memory_command"
MEMORY = ["memory", "--model", f"{OWN}:Own", "--inputs", f"{OWN}:batch"]


def only_line(printed: str) -> str:
    (line,) = [each for each in printed.splitlines() if not each.endswith(" ...")]  # progress
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "shardlite: error: the following arguments are required: COMMAND (see shardlite --help)"),
        (["--frob"], "COMMAND (see shardlite --help)"),
        (["frob"], "argument COMMAND: invalid choice: 'frob' (choose from"),
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
        (["ring", "--ranks", "65"], "--ranks is 65; it must be from 1 to 64 (see shardlite ring --help)"),
        (["plan"], "the following arguments are required: --model (see shardlite plan --help)"),
        (
            ["plan", "--model", "frob"],
            "--model 'frob' is neither a preset, nor a file, nor module:name; presets are gpt2,",
        ),
        ([*PLAN, "--card", "big"], "neither an amount (80GB, 24GiB) nor one of A100-80GB"),
        ([*PLAN, "--cluster", "mine"], "is not one of dgx-h100"),
        ([*PLAN, "--ranks", "0"], "1 to 4096 ranks"),
        (
            [*PLAN, "--offload", "4XB"],
            "'4XB' is neither true, nor a share of the states (0.5), nor an amount that stays",
        ),
        ([*PLAN, "--offload", "1.5"], "argument --offload: '1.5' is neither true"),
        ([*PLAN, "--offload", "1KB"], "offload=1000 is the number of bytes of states that stay on the GPU, but the"),
        ([*PLAN, "--offload", "--cluster", "cpu"], "--offload needs GPUs, and the cluster cpu has none"),
        (
            ["train", "--offload", "0.5", "--optimizer", "torch.SGD"],
            "offload is 0.5, which requires the optimizer adamw",
        ),
        ([*PLAN, "--master", "split24"], 'master="split24" keeps weights as bf16'),
        (
            [*PLAN, "--compute", "bf16", "--keep", "mlp, nrm"],
            "keep has 'nrm', but the model has no module or parameter",
        ),
        ([*PLAN, "--keep", "mlp"], "keep says what is not computed in the dtype `compute`: pass compute too"),
        ([*PLAN, "--context", "0"], "--context must be at least 1, got 0"),
        (["ring", "--ranks=0"], "--ranks is 0; it must be from 1 to 64"),
        (["ring", "--operation=all-reduce"], "argument --operation: invalid choice: 'all-reduce'"),
        (["ring", "--algorithm=hierarchical"], "--algorithm hierarchical needs --node: ranks per node, a divisor of 4"),
        (["ring", "--algorithm=hierarchical", "--node=3"], "hierarchical: nodes of 3 ranks do not divide a world of 4"),
        (["ring", "--algorithm=hierarchical", "--node=0"], "hierarchical: nodes of 0 ranks do not divide a world of 4"),
        (["ring", "--node=2"], "ring: nodes of 2 ranks; only 'hierarchical' supports nodes"),
        ([*MEMORY, "--systems", "fsdp3"], "--systems 'fsdp3' is not one of 'activations'"),
        ([*MEMORY, "--ranks", "0"], "--ranks must be at least 1, got 0"),
        ([*MEMORY, "--batch", "0"], "--batch must be at least 1, got 0"),
        ([*MEMORY, "--steps", "0"], "--steps must be at least 1, got 0"),
        ([*MEMORY, "--json", "nowhere/rows.jsonl"], "--json nowhere/rows.jsonl: there is no folder"),
        ([*MEMORY, "--plots", __file__], "is a file; a folder is needed"),
        ([*MEMORY, "--timeline", "nowhere/step.png"], "there is no folder"),
        ([*MEMORY, "--timeline", "step.png", "--ranks", "1", "2"], "--timeline takes one number of --ranks, got 2"),
        ([*MEMORY, "--master", "split24"], 'master="split24" keeps weights as bf16'),
        ([*MEMORY, "--timeline", "step.png", "--model", f"{OWN}:Broken"], "no such layer"),
        ([*MEMORY, "--model", "no-such-model"], "is neither a preset, nor a file, nor module:name"),
        (
            ["train", "--master", "split24"],
            "master split24 keeps weights as bf16 plus 8 bits, so it requires precision bf16, got fp32",
        ),
        (
            ["train", "--optimizer", "torch.SGD", "--state", "int8"],
            "state is int8, which requires the optimizer adamw or muon; got torch.SGD",
        ),
        (
            ["train", "--optimizer", "torch.SGD", "--precision", "bf16", "--master", "split24"],
            "master is split24, which requires the optimizer adamw or muon; got torch.SGD",
        ),
        (
            ["train", "--optimizer", "torch.SGD", "--in-backward"],
            "in_backward is true, which requires the optimizer adamw",
        ),
        (["train", "--precision", "fp16", "--in-backward"], "in_backward does not support precision fp16"),
        (["train", "--optimizer", "mouse"], "optimizer must be one of adamw, muon, torch.AdamW,"),
        (["train", "--optimizer", "muon", "--adamw-lr", "0"], "adamw_lr must be positive, got 0.0"),
        (["train", "--adamw-lr", "1"], "adamw_lr is 1.0, which requires the optimizer muon; got adamw"),
        (
            ["train", "--optimizer", "torch.optim.Adafactor", "--in-backward"],
            "in_backward is true, which requires the optimizer adamw; got torch.optim.Adafactor",
        ),
        (["train", "--save-every", "0"], "save_every must be positive, got 0"),
        (["doctor", "--ranks", "0"], "--ranks is 0; it must be at least 1"),
    ],
)
def test_wrong_usage_is_one_line_and_starts_no_rank(refusal, monkeypatch, arguments, words):
    monkeypatch.setattr(launch, "launch", None)
    assert words in only_line(refusal(main, arguments))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_refuses_what_it_does_not_know(refusal, name):
    model = ["--model", "gpt2"] if name in ("plan", "memory") else []
    files = ["a", "b"] if name in ("export", "import") else []
    line = only_line(refusal(main, [name, *model, *files, "--frob"]))
    assert line.startswith(f"shardlite {name}: error: ")
    assert line.endswith(f"(see shardlite {name} --help)")
