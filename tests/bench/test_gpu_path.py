"""`bench.host --gpu-path` counts what the host does per block on the code path of a GPU. The counts may only fall.

If the library does less, record it: `python -m bench.host --gpu-path counts --json bench/results/host-gpu-path.jsonl`.
"""

import re
from importlib.util import find_spec

import pytest

from bench import gpu_path
from bench.gpu_path import counts_of
from shardlite.lab.table import RESULTS, read_rows
from tests.support.ranks.scripts import run_process

PINNED = RESULTS / "host-gpu-path.jsonl"
COMMAND = "python -m bench.host --gpu-path counts --json bench/results/host-gpu-path.jsonl"
VERSIONS = ("torch", "transformers", "python")

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: make test-all installs it"
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def by_name(rows):
    """Return the counts by block, system and key."""
    found = {(row["block"], row["system"]): counts_of(row) for row in rows}
    return {(*names, key): number for names, counts in found.items() for key, number in counts.items()}


def changes(found, pinned):
    """Return in words which counts have risen, and which have fallen."""
    before, now = by_name(pinned), by_name(found)
    differing = [(key, before.get(key, 0), now.get(key, 0)) for key in {**before, **now}]
    words = {True: [], False: []}
    for key, was, number in differing:
        if was != number:
            words[number > was].append(f"{', '.join(key)}: {was} before, now {number}")
    return words[True], words[False]


@needs_transformers
@needs_triton
def test_the_host_does_no_more_per_block_than_before(tmp_path, monkeypatch):
    monkeypatch.delenv("SHARDLITE_POISON")  # it fills buffers
    done = run_process("-m", "bench.host", "--gpu-path", "counts", "--json", str(tmp_path / "rows.jsonl"))
    assert done.status == 0, done.err
    found, pinned = read_rows([tmp_path / "rows.jsonl"]), read_rows([PINNED])
    assert gpu_path.render(found) in done.out
    versions = [{key: rows[0][key] for key in VERSIONS} for rows in (found, pinned)]
    if versions[0] != versions[1]:
        pytest.skip(f"counted with {versions[0]}, and not with {versions[1]}, which calls other functions")
    risen, fallen = changes(found, pinned)
    assert not risen, "the host does more per block:\n" + "\n".join(risen)
    assert not fallen, f"the host does less per block: record it with `{COMMAND}`\n" + "\n".join(fallen)


def test_each_count_is_described_and_in_the_table():
    pinned = read_rows([PINNED])
    assert {(row["block"], row["system"]) for row in pinned} == {
        (block, system) for block in gpu_path.BLOCKS for system in gpu_path.BUILDS
    }
    described = re.findall(r"`([a-z_ ]+?)(?: [A-Z]+)?`", gpu_path.__doc__ or "")
    table = gpu_path.render(pinned)
    for _, _, key in by_name(pinned):
        assert key.startswith(tuple(described)), key
        assert f"| {key} |" in table


@pytest.mark.slow
@needs_transformers
@needs_triton
def test_launches_of_all_kernels_of_a_step_are_timed():
    done = run_process("-m", "bench.host", "--gpu-path", "launches")
    assert done.status == 0, done.err
    launched = {key.removeprefix("triton ") for *_, key in by_name(read_rows([PINNED])) if key.startswith("triton ")}
    for name in {*launched, "adamw, adding rows"}:
        assert f"| {name} |" in done.out
