"""A script on the warm cluster finds what `torchrun` provides, and leaves the ranks as they were."""

import logging
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks.cluster import RemoteError
from tests.support.ranks.scripts import _as_script, run_script

LOOKS = """
import logging, os, pickle, random, sys, warnings
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class Record:
    pass


assert __name__ == "__main__" and Path(__file__).exists() and sys.argv == [__file__, "--steps", "3"]
assert type(pickle.loads(pickle.dumps(Record()))) is Record
assert not dist.is_initialized()
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
assert rank == int(os.environ["LOCAL_RANK"]) == dist.get_rank()
assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size() == dist.group.WORLD.size() == 2
total = torch.tensor([rank + 1.0])
for group in (None, init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))["inner"].get_group()):
    dist.all_reduce(total, group=group)
assert total.item() == 6
assert not torch.cuda.is_available()
Path(f"rank-{rank}").touch()
print("rank", rank)

os.environ["RANK"] = os.environ["NEW"] = "7"
os.chdir("/")
sys.argv.append("more")
sys.path.insert(0, "/nowhere")
for draw in (random.random, numpy.random.rand, lambda: torch.rand(1)):
    draw()
logging.basicConfig(level=logging.DEBUG)
logging.getLogger("shardlite").setLevel(logging.DEBUG)
logging.getLogger("shardlite").addHandler(logging.StreamHandler())
warnings.simplefilter("ignore")
dist.destroy_process_group()
assert not dist.is_initialized()
"""


def state():
    """What a script may change."""
    loggers = [(each.level, each.handlers[:], each.propagate) for each in map(logging.getLogger, ("", "shardlite"))]
    process = (
        dict(os.environ),
        Path.cwd(),
        list(sys.argv),
        list(sys.path),
        list(warnings.filters),
        id(sys.modules["__main__"]),
    )
    chance = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    groups = id(dist.group.WORLD), len(dist.distributed_c10d._world.pg_map)
    return loggers, process, chance, groups


def leaves_no_trace(group, script, folder):
    """Body of a rank."""
    before = state()
    done = _as_script(group, [str(script), "--steps", "3"], folder, "error")
    for was, now in zip(before, state(), strict=True):
        assert was == now
    return done.out


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def test_a_script_finds_a_launched_rank_and_leaves_no_trace(cluster, script, tmp_path):
    assert cluster.run(leaves_no_trace, 2, script(LOOKS), tmp_path) == ["rank 0\n", "rank 1\n"]
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first = 1\n\nfirst / 0  # here\n", r'train.py", line 3, in <module>\s+first / 0  # here'),
        ("import sys\nsys.exit(3)\n", "train.py exited with status 3"),
        ("import warnings\nwarnings.warn('old')\n", "UserWarning: old"),
        ("import torch.distributed as dist\ndist.get_rank()\n", "Default process group has not been initialized"),
        ("import torch.distributed as dist\n" + 2 * "dist.init_process_group()\n", "initialized twice"),
        ("import torch.distributed as dist\ndist.init_process_group('nccl')\n", "the cluster's group is gloo's"),
    ],
    ids=["line", "status", "warning", "no group", "twice", "backend"],
)
def test_what_goes_wrong_in_a_script_fails_with_its_line(cluster, script, text, message):
    with pytest.raises(RemoteError, match=message):
        run_script(cluster, script(text))
