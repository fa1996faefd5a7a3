"""A trainer that shards nothing, because it uses one process, says so once; of several processes each is an error."""

from typing import Any

import pytest
from torch import nn

from shardlite import LayoutError, ShardWarning
from shardlite.integrations import _wrapping
from tests.support.ranks.scripts import ROOT, run_process

EXAMPLE = str(ROOT / "examples" / "trainer.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An accelerator of one process, with the bridge."""
    accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate: `make test-all` installs it")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from shardlite.integrations.accelerate import install, uninstall

    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    _wrapping._warn_once.cache_clear()
    install()
    yield accelerate.Accelerator(cpu=True)
    uninstall()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_one_process_with_accelerate_is_warned_once(accelerator):
    with pytest.warns(ShardWarning, match="install.. shards nothing in one process: start the program with torchrun"):
        model = accelerator.prepare(nn.Linear(2, 2))
    assert type(model) is nn.Linear
    accelerator.prepare(nn.Linear(2, 2))  # warnings are errors


def test_evaluation_in_one_process_is_not_warned_of(accelerator):
    accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)


def test_processes_that_accelerate_does_not_join_are_refused(accelerator, monkeypatch):
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"2 processes were started.*Accelerator\(cpu=True\)"):
            accelerator.prepare(nn.Linear(2, 2))


@pytest.mark.slow
def test_one_process_with_transformers_is_warned_once(tmp_path):
    pytest.importorskip("transformers", "5.23", reason="needs transformers")
    done = run_process(EXAMPLE, "--max_steps", "1", folder=tmp_path, warnings="always")
    assert done.status == 0, done.err
    assert done.err.count("ShardWarning: ShardLiteTrainer shards nothing in one process") == 1


@pytest.mark.slow
def test_processes_that_transformers_does_not_join_are_refused(tmp_path):
    pytest.importorskip("transformers", "5.23", reason="needs transformers")
    done = run_process(*TORCHRUN, EXAMPLE, "--max_steps", "1", "--use_cpu", "False", folder=tmp_path)
    assert done.status != 0
    assert "LayoutError: ShardLiteTrainer: 2 processes were started" in done.err, done.err
    assert "use_cpu=True" in done.err


@pytest.mark.slow
def test_an_accelerator_that_does_not_join_the_processes_is_refused(tmp_path):
    """Without GPUs and `cpu=True`, it initializes a process group that it does not use."""
    pytest.importorskip("accelerate", reason="needs accelerate: `make test-all` installs it")
    text = (ROOT / "examples" / "accelerate_loop.py").read_text()
    (tmp_path / "loop.py").write_text(text.replace("cpu=not torch.cuda.is_available()", ""))
    done = run_process(*TORCHRUN, "loop.py", folder=tmp_path)
    assert done.status != 0
    assert "LayoutError: install(): 2 processes were started, and the trainer uses 1" in done.err, done.err
