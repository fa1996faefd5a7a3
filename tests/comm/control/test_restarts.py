"""`torchrun --max-restarts` after a rank was killed: the run goes on from its checkpoint, with the same bits."""

from pathlib import Path

import pytest
import torch

from shardlite.cli.launch import OWN_STORE
from tests.support.ranks.scripts import run_process
from tests.support.twins.sharded import same_states

PROGRAM = Path(__file__).with_name("restarted.py")


def trained(folder: Path, transport: str, fatal: int) -> dict[str, torch.Tensor]:
    """Return the weights at the end of a run that is interrupted at step `fatal`."""
    folder.mkdir()
    launcher = ["-W", "default", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_process(*launcher, "--max-restarts=1", str(PROGRAM), str(folder), transport, str(fatal))
    assert done.status == 0, done.out + done.err
    assert (folder / "attempt").read_text() == ("1" if fatal >= 0 else "0"), done.err
    return torch.load(folder / "final.pt")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of a run that nothing has interrupted."""
    return trained(tmp_path_factory.mktemp("whole") / "run", "shared_memory", -1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
def test_a_run_that_is_started_again_has_the_same_bits(expected, tmp_path, monkeypatch, transport):
    monkeypatch.setenv(OWN_STORE, "1")
    got = trained(tmp_path / "interrupted", transport, 3)
    same_states("state", got, expected)
