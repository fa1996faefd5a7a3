"""`examples/torchrun_template.py` and the recipes that start it: a run goes on with the ranks that are left."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.support.patience import seconds, until
from tests.support.ranks.scripts import IMPORTED_FROM, ROOT, run_script

EXAMPLES = ROOT / "examples"
TEMPLATE = EXAMPLES / "torchrun_template.py"
LAUNCH = EXAMPLES / "launch"


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch):
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torchrun_template

    return torchrun_template


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_samples_of_a_step(template, world_size, accumulate):
    places = [template.Place(rank, world_size, torch.device("cpu")) for rank in range(world_size)]
    read = [number for place in places for part in template.shares(40, place, 5, accumulate) for number in part]
    assert sorted(read) == list(range(40, 40 + world_size * 5 * accumulate))


def test_an_epoch_has_each_window_once_in_an_order_of_its_own(template):
    text = torch.arange(10 * template.CONFIG.context + 1, dtype=torch.int64).numpy()
    windows = template.Windows(text, 3, torch.device("cpu"))
    starts = [[int(windows[10 * epoch + i][0]) // template.CONFIG.context for i in range(10)] for epoch in range(2)]
    assert [sorted(epoch) for epoch in starts] == [list(range(10))] * 2
    assert starts[0] != starts[1]
    x, y = windows.batch(range(4, 6))
    assert x.shape == y.shape == (2, template.CONFIG.context)
    assert torch.equal(x[:, 1:], y[:, :-1])


def steps_in(log: str) -> list[tuple[int, int]]:
    """Return the first and the last sample of each step that a run has printed."""
    return [(int(first), int(last)) for first, last in re.findall(r"^samples (\d+) to (\d+) ", log, re.MULTILINE)]


def kept_steps(log: str) -> list[tuple[int, int]]:
    """Return the steps that count: where the run went on, those that it takes again replace what was lost."""
    kept: list[tuple[int, int]] = []
    for first, last in steps_in(log):
        while kept and kept[-1][1] >= first:
            kept.pop()
        kept.append((first, last))
    return kept


def assert_each_sample_was_read_once(log: str, samples: int) -> None:
    following = 0
    for first, last in kept_steps(log):
        assert first == following, log
        following = last + 1
    assert following >= samples, log


def test_the_template_goes_on_and_scales_its_rate(cluster, tmp_path, template):
    options = ["--batch", 2, "--accumulate", 1, "--warmup", 8, "--out", tmp_path / "run"]
    first = run_script(cluster, TEMPLATE, *options, "--samples", 12)[0].out
    second = run_script(cluster, TEMPLATE, *options, "--samples", 20)[0].out
    assert "2 ranks resume at sample 12 of 20, 4 a step" in second
    assert_each_sample_was_read_once(first + second, 20)
    read = [str(each) for each in options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["template", *read])
        parsed = template.parse()
    assert template.learning_rate(0, 4, parsed) == pytest.approx(2e-3 * 4 / 16 * 4 / 8)
    assert template.learning_rate(80, 4, parsed) == pytest.approx(2e-3 * 4 / 16)


def environment(**more: str) -> dict[str, str]:
    """Return what a recipe finds: this tree, and commands of this interpreter first."""
    paths = {"PYTHONPATH": os.pathsep.join(map(str, IMPORTED_FROM)), "PATH": path_with_torchrun(), **more}
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **paths}


def path_with_torchrun() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


# ---- Slurm -----------------------------------------------------------------------------------------------------------

SRUN = '#!/bin/sh\necho $$ > "$ASKED.srun"\nexec "$@"\n'
SCONTROL = '#!/bin/sh\nif [ "$1" = show ]; then echo localhost; else echo "$@" >> "$ASKED"; fi\n'


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_for_slurm_starts_the_run_and_queues_what_was_told_to_end(tmp_path):
    """`srun` and `scontrol` are played: one runs its command on this host, the other writes down what it was asked."""
    for name, script in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "RANKS_PER_NODE": "2"}
    job |= {"ASKED": str(tmp_path / "asked"), "PATH": f"{tmp_path}{os.pathsep}{path_with_torchrun()}"}
    command = ["bash", str(LAUNCH / "slurm.sbatch"), str(TEMPLATE), "--out", str(tmp_path / "run"), "--batch", "1"]
    with (tmp_path / "log").open("w") as log, running([*command, "--samples", "100000"], job, log) as script:
        until(lambda: "samples 8 to" in (tmp_path / "log").read_text())
        os.kill(int((tmp_path / "asked.srun").read_text()), signal.SIGTERM)  # as Slurm does: not the script
        assert script.wait(seconds(60)) != 0
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    following = kept_steps((tmp_path / "log").read_text())[-1][1] + 1
    done = subprocess.run(
        [*command, "--samples", str(following + 4)], env=environment(**job), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"2 ranks resume at sample {following} of" in done.stdout
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


@contextmanager
def running(command: list[str], more: dict[str, str], log) -> Iterator[subprocess.Popen]:
    """Start a command in a group of its own, which ends with the block."""
    process = subprocess.Popen(command, env=environment(**more), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---- two hosts -------------------------------------------------------------------------------------------------------

HOSTS = {"first": "10.201.77.1", "second": "10.201.77.2"}


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two network namespaces with a link between them: the names of the namespaces, by host."""
    names = {host: f"shardlite-{host}-{os.getpid()}" for host in HOSTS}
    if shutil.which("ip") is None or os.geteuid() != 0 or ip("netns", "add", names["first"], check=False).returncode:
        pytest.skip("needs iproute2, and the right to make network namespaces")
    try:
        ip("netns", "add", names["second"])
        ip("link", "add", "first", "netns", names["first"], "type", "veth", "peer", "second", "netns", names["second"])
        for host, name in names.items():
            ip("-n", name, "address", "add", f"{HOSTS[host]}/24", "dev", host)
            for device in (host, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names.values():
            for pid in ip("netns", "pids", name, check=False).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            ip("netns", "delete", name, check=False)


@pytest.mark.slow
def test_a_run_on_two_hosts_goes_on_when_one_is_lost(hosts, tmp_path):
    """Each host has two ranks. All processes of one host are killed: the other goes on, and no sample is lost."""

    def on(host: str) -> list[str]:
        variables = {"HOSTS": "1:2", "RANKS": "2", "HEAD": HOSTS["first"], "ADDRESS": HOSTS[host], "DEVICE": host}
        command = [str(LAUNCH / "host.sh"), str(TEMPLATE), "--out", str(tmp_path / "run"), "--batch", "1"]
        settings = [f"{name}={value}" for name, value in {**variables, "LAST_CALL": "5"}.items()]
        return ["ip", "netns", "exec", hosts[host], "env", *settings, *command, "--samples", "800", "--every", "10"]

    log = tmp_path / "first.log"
    with log.open("w") as file, (tmp_path / "second.log").open("w") as other:
        with running(on("first"), {}, file) as first, running(on("second"), {}, other):
            until(lambda: "samples 160 to" in log.read_text() or first.poll() is not None)
            assert "4 ranks resume at sample 0 of 800, 8 a step" in log.read_text(), log.read_text()
            for pid in ip("netns", "pids", hosts["second"]).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            assert first.wait(seconds(240)) == 0, log.read_text()
    assert re.search(r"2 ranks resume at sample [1-9]\d* of 800, 4 a step", log.read_text())
    assert_each_sample_was_read_once(log.read_text(), 800)


def test_the_manifest_for_kubernetes_says_what_the_recipe_takes():
    yaml = pytest.importorskip("yaml", reason="needs pyyaml: `make test-all` installs it", exc_type=ImportError)
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    command = pod["containers"][0]["args"][0]
    asked = set(re.findall(r"^# ([A-Z]+) ", (LAUNCH / "host.sh").read_text(), re.MULTILINE)) - {"DEVICE"}
    assert set(re.findall(r"\b([A-Z]+)=", command)) == asked
    name = job["metadata"]["name"]
    assert (service["metadata"]["name"], pod["subdomain"], service["spec"]["selector"]["job-name"]) == (name,) * 3
    assert f"HEAD={name}-0.{name} " in command
    assert f"HOSTS={job['spec']['completions']} " in command
