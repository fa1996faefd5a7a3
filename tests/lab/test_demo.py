import csv
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shardlite.cli import launch, main
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.train.report import Point, printable, write_curve
from shardlite.lab.train.settings import GPTConfig, Settings
from shardlite.lab.train.text import draw_batch, read_corpus, unigram_entropy
from shardlite.lab.train.train import learning_rate
from tests.support.ranks.cluster import RemoteError
from tests.support.ranks.scripts import run_command

SMALL = GPTConfig(layers=2, width=16, heads=2, context=8)
CURVE = [Point(1, 5.5, None), Point(2, 5.0, 5.1), Point(3, 4.5, 4.75)]


# ---- text -----------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_the_order_of_names_without_binary_and_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"b" * 100)
    (tmp_path / "sub" / "c.txt").write_bytes(b"c" * 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 200)
    (tmp_path / ".hidden").write_bytes(b"x" * 100)
    (tmp_path / "image").write_bytes(b"\0" * 100)
    corpus = read_corpus(tmp_path, context=8)
    assert bytes(corpus.train) == b"a" * 180 + b"b" * 90 + b"c" * 90
    assert bytes(corpus.validation) == b"a" * 20 + b"b" * 10 + b"c" * 10


def test_a_file_is_read_up_to_the_limit(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 10)
    corpus = read_corpus(file, context=8, limit=1000)
    assert len(corpus.train) == 900
    assert len(corpus.validation) == 100
    assert not set(range(45, 50)) & set(corpus.train[:50].tolist())  # the end of the first stretch is validation's


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "no text in"), (b"x" * 60, "has 0 bytes, but a context of 8 needs at least 9")],
)
def test_unusable_text_is_refused_with_a_remedy(tmp_path, content, message):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_corpus(file, context=8)


def test_a_batch_follows_from_its_key_and_y_follows_x():
    text = np.arange(200, dtype=np.uint8)
    x, y = draw_batch(text, shape=(4, 8), key=(0, 1, 2))
    assert x.shape == y.shape == (4, 8)
    assert torch.equal(y, x + 1)
    assert torch.equal(draw_batch(text, shape=(4, 8), key=(0, 1, 2))[0], x)
    for other_key in ((1, 1, 2), (0, 0, 2), (0, 1, 3)):
        assert not torch.equal(draw_batch(text, shape=(4, 8), key=other_key)[0], x)


def test_a_batch_reaches_the_last_byte():
    text = np.arange(10, dtype=np.uint8)
    _, y = draw_batch(text, shape=(50, 8), key=(0,))
    assert y.max() == 9


# ---- model ----------------------------------------------------------------------------------------------------------


def test_gpt_gives_logits_or_the_mean_loss():
    model, x, y = GPT(SMALL), torch.randint(0, 256, (3, 8)), torch.randint(0, 256, (3, 8))
    logits = model(x)
    assert logits.shape == (3, 8, 256)
    expected = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x, y), expected)
    assert model(x, y).item() == pytest.approx(math.log(256), abs=0.1)  # it knows nothing yet


def test_a_later_byte_changes_no_earlier_logits():
    model, x = GPT(SMALL), torch.randint(0, 255, (1, 8))
    changed = x.clone()
    changed[0, 5] += 1
    before, after = model(x), model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=0)
    assert not torch.equal(after[:, 5], before[:, 5])


def test_too_long_a_text_and_uneven_heads_are_refused():
    with pytest.raises(ValueError, match="got 9 bytes, but its context is 8"):
        GPT(SMALL)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="multiple of twice the heads: width 16, heads 3"):
        GPTConfig(width=16, heads=3)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        GPTConfig(layers=0)


# ---- settings, measurement, report ----------------------------------------------------------------------------------


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    settings = Settings(steps=100, lr=1.0)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[99] == pytest.approx(0.1, abs=0.01)
    assert learning_rate(Settings(steps=1, lr=1.0), 0) == 1.0


def test_without_matplotlib_the_csv_is_written_and_the_remedy_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    told = write_curve(tmp_path, CURVE, entropy=3.1)
    assert (tmp_path / "loss.csv").exists()
    assert not (tmp_path / "loss.png").exists()
    assert "pip install 'shardlite[demo]'" in told[1]


def test_a_sample_cannot_command_the_terminal():
    assert printable(b"a\tb\n\xc3\xa9 \x1b[2J\xff\r") == "a\tb\n\u00e9 \ufffd[2J\ufffd\ufffd"


# ---- command line ---------------------------------------------------------------------------------------------------


def test_train_starts_itself_once_per_rank(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(launch, "launch", lambda *args, **options: started.append((args, options)) or 7)
    arguments = ["train", "--ranks", "3", "--out", str(tmp_path)]
    assert main(arguments) == 7
    assert started == [((3, arguments), {"restarts": 0})]
    assert launch.torchrun(3, arguments)[1:] == [
        *("-m", "shardlite.cli.launcher", "--standalone", "--nproc-per-node", "3", "-m", "--", "shardlite"),
        *arguments,
    ]


def test_the_number_of_ranks_must_be_what_the_launcher_started(monkeypatch, refusal):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "--ranks is 2" in refusal(main, ["train", "--ranks", "2"])


def test_ranks_share_the_cores_unless_told_otherwise():
    assert int(launch.environment_for(1, {})["OMP_NUM_THREADS"]) >= 1
    assert launch.environment_for(10_000, {"HOME": "/"}) == {"OMP_NUM_THREADS": "1", launch.OWN_STORE: "1", "HOME": "/"}
    assert launch.environment_for(2, {"OMP_NUM_THREADS": "5", launch.OWN_STORE: "0"}) == {
        "OMP_NUM_THREADS": "5",
        launch.OWN_STORE: "0",
    }


def test_each_rank_has_a_gpu_of_its_own_or_a_share_of_one():
    def place(gpus, local_rank, local_ranks):
        return launch.place(gpus, {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_ranks)})

    assert launch.place(0, {}) == ("cpu", "gloo")
    assert place(4, 3, 4) == ("cuda:3", "cpu:gloo,cuda:nccl")
    assert place(8, 1, 2) == ("cuda:1", "cpu:gloo,cuda:nccl")
    assert [place(2, local_rank, 4) for local_rank in range(4)] == [("cuda:0", "gloo"), ("cuda:1", "gloo")] * 2


def test_there_are_as_many_ranks_as_gpus_or_two(monkeypatch):
    for gpus, ranks in ((0, 2), (1, 1), (8, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert launch.default_ranks() == ranks


def test_help_and_version(capsys):
    for arguments, expected in ((["--version"], "shardlite "), (["train", "--help"], "--accumulate N")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


TINY = ["--size", "tiny", "--layers", "1", "--context", "32", "--lr", "0.01", "--accumulate", "2"]


@pytest.fixture
def text(tmp_path):
    """Easy to learn."""
    path = tmp_path / "text"
    path.write_bytes(b"To shard is to share. " * 1000)
    return path


def assert_reported(out: str, stage: int) -> None:
    assert f"on 2 ranks, stage {stage}" in out
    assert "rank 1  data parallel" in out
    assert "The model writes:" in out


def validation_losses(folder: Path) -> list[float]:
    with (folder / "loss.csv").open() as file:
        return [float(told) for row in csv.DictReader(file) if (told := row["validation_nats_per_byte"])]


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "adamw"), (3, "adamw"), (2, "muon")])
def test_a_tiny_model_learns_on_two_ranks(cluster, tmp_path, text, stage, optimizer):
    options = [*TINY, "--steps", 12, "--stage", stage, "--optimizer", optimizer, "--data", text, "--out", tmp_path]
    first, second = run_command(cluster, main, "train", *options)
    assert first.status == second.status == 0
    assert second.out == ""
    assert_reported(first.out, stage)
    validation = validation_losses(tmp_path)
    assert len(validation) == 8
    assert validation[-1] < unigram_entropy(np.frombuffer(text.read_bytes(), dtype=np.uint8))
    assert (tmp_path / "loss.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_a_limit_chooses_the_options(cluster, tmp_path, text):
    """The run has as many sequences per step as was asked for, in smaller micro-batches."""
    options = [*TINY, "--batch", 8, "--steps", 2, "--data", text, "--out", tmp_path]
    first, second = run_command(cluster, main, "train", *options, "--fit", "1.2MB")
    assert first.status == second.status == 0
    assert "16 rows per rank and step, 1.20 MB per rank: the 3 cheapest runs that fit" in first.out
    assert "for part in range(" in first.out
    assert "The model writes:" in first.out
    with pytest.raises(RemoteError, match="nothing fits in 100 KB"):
        run_command(cluster, main, "train", *options, "--fit", "100KB")
