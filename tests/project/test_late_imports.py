"""`import shardlite` imports nothing heavy, and `--help` or a wrong option imports no PyTorch."""

import ast
import pickle
import re
from inspect import getsource, signature

import pytest

import shardlite
from shardlite import plan
from shardlite.cli import options
from shardlite.lab.compared.systems import MEASURED as SYSTEMS
from shardlite.lab.memory import command as memory_command
from tests.support.ranks.scripts import Done, run_process

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "sympy",
    "einops",
)


def run(program: str) -> list[str]:
    """Return the words that a program prints, in a process of its own."""
    done = run_process("-c", program)
    assert done.status == 0, done.err
    return done.out.split()


def loaded_by(program: str, *modules: str) -> list[str]:
    """Return those of some modules that a program has imported."""
    return run(f"{program}\nimport sys\nprint(*(name for name in {modules!r} if name in sys.modules))")


# ---- import shardlite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import torch, shardlite", marks=pytest.mark.slow),
        "from shardlite import ShardLite, AdamW, EMA, Precision, Route, CommError",
    ],
)
def test_the_library_imports_nothing_that_most_programs_do_not_use(program):
    assert loaded_by(program, *HEAVY) == []


def test_without_pytorch_nothing_is_imported():
    assert loaded_by("import shardlite", "torch", "numpy", "shardlite.model") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    ["shardlite.config", "shardlite.optim", "shardlite.comm", "shardlite_kernels", "shardlite.lab.compared.gpt"],
)
def test_any_of_our_modules_may_be_the_first_to_import_pytorch(first):
    words = run(f"import shardlite, {first}\nprint(shardlite.Precision.__module__)\nfrom shardlite import ShardLite")
    assert words == ["shardlite.config"]


def test_the_library_may_be_imported_again():
    program = "import shardlite, importlib; importlib.reload(shardlite)\n"
    program += "import torch.distributed.checkpoint.state_dict; print(shardlite.ShardLite.__name__)"
    assert run(program) == ["ShardLite"]


# ---- its names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("shardlite", "torch.distributed.checkpoint"),
        ("shardlite.model", "torch"),
        ("shardlite", "shardlite.checkpoint"),
    ],
)
def test_state_dicts_are_patched_whatever_a_program_imports(first, later):
    program = f"""
from {first} import ShardLite
import torch
torch.distributed.init_process_group("fake", rank=0, world_size=1)
ShardLite(torch.nn.Linear(2, 2))
import {later}
from torch.distributed.checkpoint import state_dict
print(state_dict._load_optim_state_dict.__wrapped__.__name__)
"""
    assert run(program) == ["_load_optim_state_dict"]


def test_all_names_are_there():
    assert set(shardlite.__all__) <= set(dir(shardlite))
    for name in shardlite.__all__:
        assert getattr(shardlite, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'shardlite' has no attribute 'safe'"):
        _ = shardlite.safe


def test_a_type_checker_reads_where_late_names_come_from():
    blocks = [node for node in ast.parse(getsource(shardlite)).body if isinstance(node, ast.If)]
    imports = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == shardlite._LATE


def test_late_names_are_the_functions_themselves():
    for name in shardlite._LATE:
        each = getattr(shardlite, name)
        assert pickle.loads(pickle.dumps(each)) is each
    assert [*signature(shardlite.save).parameters][:2] == ["path", "model"]


# ---- the command line -----------------------------------------------------------------------------------------------

COMMANDS = ["train", "verify", "doctor", "plan", "memory", "ring", "inspect", "export", "import"]
REPORT = """
import sys
from shardlite.cli import main
try:
    main(sys.argv[1:])
finally:
    print("PyTorch is imported:", "torch" in sys.modules, file=sys.stderr)
"""


def answer(*arguments: str) -> Done:
    """Run a command line, and require that it has not imported PyTorch."""
    done = run_process("-c", REPORT, *arguments)
    assert "PyTorch is imported: False" in done.err, done.err
    return done


def test_help_and_version_need_no_pytorch():
    done = answer("--help")
    assert done.status == 0
    assert re.findall(r"^    (\w+)\s", done.out, re.MULTILINE) == COMMANDS
    assert answer("--version").out == f"shardlite {shardlite.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_needs_no_pytorch(command):
    done = answer(command, "--help")
    assert done.status == 0
    assert done.out.startswith(f"usage: shardlite {command} ")


def test_nor_does_the_package_as_a_program():
    program = "import runpy, sys\nsys.argv[1:] = ['--version']\n"
    program += "try: runpy.run_module('shardlite', run_name='__main__')\nfinally: print('torch' in sys.modules)"
    assert run(program) == ["shardlite", shardlite.__version__, "False"]


@pytest.mark.parametrize(
    "arguments", [["train"], ["verify"], ["plan", "--model", "gpt2"], ["memory", "--model", "gpt2"]]
)
def test_a_command_whose_models_need_einops_names_the_extra(arguments):
    program = "import sys\nsys.modules['einops'] = None\nfrom shardlite.cli import main\nmain(sys.argv[1:])"
    done = run_process("-c", program, *arguments)
    words = "its models need einops, which is not installed; pip install 'shardlite[demo]'"
    told = f"shardlite {arguments[0]}: error: {words} (see shardlite {arguments[0]} --help)\n"
    assert (done.status, done.err) == (2, told)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nothing", "invalid choice: 'nothing'"),
        ("train --steps many", "invalid int value: 'many'"),
        ("train --steps 0", "steps must be positive, got 0"),
        ("train --ranks 0", "--ranks is 0; it must be at least 1"),
        ("train --data /no/such/file", "/no/such/file does not exist"),
        ("verify --compute fp8", "invalid choice: 'fp8'"),
        ("verify --heads 5", "width must be a multiple of twice the heads"),
        ("doctor --ranks 0", "--ranks is 0; it must be at least 1"),
        ("plan --model gpt5", "--model 'gpt5' is neither a preset, nor a file, nor module:name"),
        ("plan --model gpt2 --card big", "--card 'big' is neither an amount"),
        ("plan --model gpt2 --cluster mine", "--cluster 'mine' is not one of dgx-h100"),
        ("plan --model gpt2 --ranks 5000", "--ranks takes 1 to 4096 ranks, got 5000"),
        ("plan --model gpt2 --state fp8", "invalid choice: 'fp8'"),
        ("memory --model gpt5", "--model 'gpt5' is neither a preset"),
        ("memory --model gpt2 --batch 0", "--batch must be at least 1, got 0"),
        ("memory --model gpt2 --timeline nowhere/step.png", "there is no folder"),
        ("memory --model gpt2 --systems fsdp3", "--systems 'fsdp3' is not one of 'activations'"),
        ("memory --model gpt2 --json nowhere/rows.jsonl", "there is no folder"),
        ("ring --algorithm star", "invalid choice: 'star'"),
        ("ring --ranks 65", "--ranks is 65; it must be from 1 to 64"),
        ("inspect", "the following arguments are required: PATH"),
        ("export a b --dtype fp8", "invalid choice: 'fp8'"),
    ],
)
def test_a_wrong_option_is_found_without_pytorch(arguments, words):
    done = answer(*arguments.split())
    assert done.status == 2
    assert words in done.err


def test_names_that_the_command_line_knows_without_pytorch_are_those_of_the_library():
    """The modules that have the library's import PyTorch."""
    assert options.MOST_RANKS == plan.MOST_RANKS
    assert tuple(SYSTEMS) == memory_command.SYSTEMS
