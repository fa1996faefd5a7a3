"""What known benches ask and how their rows are shown. Rows of other benches are shown by what their keys say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlite.apps.report.cells import is_number
from shardlite.apps.report.rows import NOISE, PROVENANCE, SETTINGS, Row, keys_of


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The range of one number over some rows."""

    key: str
    where: Mapping[str, str]
    """Keys and values of these rows."""

    words: str
    """What follows the range, as in `"0.10 to 0.25 of what FSDP2 adds"`."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How the rows of one bench are shown."""

    question: str
    words: str = ""
    """How to read the numbers."""

    command: str = ""
    """Repeats a run. An option `--name {key}` gets the values that the run's rows have under the key."""

    labels: tuple[str, ...] = ("system",)
    """Keys that tell the rows of a run apart."""

    values: tuple[str, ...] = ()
    """Keys that are plotted, at most two."""

    axis: str = ""
    """A key on the horizontal axis, for lines in place of bars. Rows may have lists under it and under `values`."""

    parts: str = ""
    """A key with an object whose numbers are parts of the first of `values`."""

    reference: str = ""
    """The system at whose values a line is drawn through the bars."""

    hidden: tuple[str, ...] = ()
    """Keys that are in the plot or follow from others, and not in the table."""

    headline: Headline | None = None


BENCHES = {
    "step": Bench(
        question="How long does a step take?",
        words="Every system takes the same steps in turn, after their results were compared. The floor is the step "
        "without communication, in which each rank steps its part of the parameters. Peaks are bytes in tensors.",
        command="python -m bench.step --ranks {ranks} --model {model} --systems {system} --precision {precision}"
        " --accumulation {accumulation} --clip {clip}",
        values=("ms_p50", "peak_bytes"),
        reference="floor",
        hidden=("activation_bytes", "tolerance_used"),
        headline=Headline(
            key="above_floor_vs_fsdp2",
            where={"system": "stage3"},
            words="of the time that FSDP2 adds to a step, at stage 3",
        ),
    ),
    "footprint": Bench(
        question="What does a process hold?",
        words="The most in a step above what a process held after its imports, as the operating system counts it "
        "(proportional set size, mean of the ranks). Colours are the purposes that memory() names at that moment; "
        "grey is the rest: activations, libraries, and all of systems that keep no account.",
        command="python -m bench.footprint --ranks {ranks} --model {model}",
        values=("pss_bytes",),
        parts="pss_purposes",
        hidden=("purposes", "weight_bytes", "wrapped_bytes"),
        headline=Headline(key="pss_vs_fsdp2", where={"system": "stage3"}, words="of what FSDP2 holds, at stage 3"),
    ),
    "scale": Bench(
        question="What do more ranks bring?",
        words="Work per second and rank, as a part of that of one rank. Weak: each rank has the same batch; strong: all"
        " ranks share one. Ranks of one machine compete for its cores. What is simulated was not measured.",
        command="python -m bench.scale",
        labels=("kind", "ranks"),
        values=("efficiency",),
        axis="ranks",
    ),
    "scale-fit": Bench(
        question="What is scaling simulated from?",
        words="Seconds of computation and of the optimizer's step on one rank, and the link that fits collectives of"
        " two.",
        command="python -m bench.scale",
    ),
    "ring": Bench(
        question="How fast are the collectives?",
        words="Times of a call on the slowest rank, on fp32 buffers, beside the peer's own collective (gloo or NCCL).",
        command="python -m bench.ring --ranks {ranks}",
        labels=("transport", "algorithm", "nbytes"),
        values=("ms_p50",),
        axis="nbytes",
        hidden=("chunk_bytes", "sent_bytes", "goal", "reached", "algbw_gbps"),
        headline=Headline(
            key="speedup",
            where={"transport": "shared_memory", "algorithm": "direct"},
            words="times as fast as gloo, over shared memory",
        ),
    ),
    "ring-fit": Bench(
        question="Which link explains these times?",
        words="The cost model's latency per step (alpha), work per message (overhead), and time per byte carried (beta)"
        " and added (gamma), in seconds, with their error at the median and at most.",
        command="python -m bench.ring --ranks {ranks}",
        labels=("transport", "key"),
    ),
    "host": Bench(
        question="What does the host do for a unit?",
        words="Blocks so small that a step is what the systems do around them; waits for other ranks are included.",
        command="python -m bench.host --ranks {ranks}",
        values=("us_per_unit_p50", "calls_per_step"),
        headline=Headline(key="us_vs_fsdp2", where={"system": "stage3"}, words="of FSDP2's time per unit, at stage 3"),
    ),
    "host-fake": Bench(
        question="What does the host do for a unit, in groups of any size?",
        words="CPU time of rank 0 in a group whose other ranks are not there, as over NCCL. Launches of NCCL and"
        " Triton are not in it.",
        command="python -m bench.host --fake {ranks}",
        labels=("system", "ranks"),
        values=("cpu_us_per_unit_p50",),
        axis="ranks",
        headline=Headline(
            key="cpu_vs_fsdp2", where={"system": "collectives"}, words="of FSDP2's CPU time, by collectives"
        ),
    ),
    "host-block": Bench(
        question="What does the host do for the reduction of a large block?",
        words="CPU time of rank 0 in a group whose other ranks are not there, as over NCCL. Launches of NCCL and"
        " Triton are not in it.",
        command="python -m bench.host --fake {ranks}",
        labels=("reduce", "ranks"),
        values=("cpu_us_p50",),
    ),
    "checkpoint": Bench(
        question="How long does a checkpoint take?",
        words="Weights and moments of all ranks, on the disk at the end. Raw writes as many bytes from memory into"
        " files.",
        command="python -m bench.faults.checkpoint --ranks {ranks} --model {model}",
        values=("mb_per_s", "stall_p50"),
        headline=Headline(key="vs_raw", where={"system": "save"}, words="of the rate of raw writes, by save"),
    ),
    "detection": Bench(
        question="What does it cost that ranks compare what they do?",
        words="The same steps with negotiation and without it, in turn.",
        command="python -m bench.faults.detection --ranks {ranks} --model {model}",
        values=("cpu_ms_p50", "cpu_ms_p50_without"),
        headline=Headline(key="talks_share", where={}, words="of the CPU time of a step"),
    ),
    "restart": Bench(
        question="How long is a run away when a rank dies?",
        command="python -m bench.faults.restart --ranks {ranks}",
    ),
    "notice": Bench(
        question="When do ranks notice that another one is gone?",
        words="From the kill of a rank to an error on the slowest of the others.",
        command="python -m bench.faults.notice --ranks {ranks} --model {model}",
        labels=("transport",),
        values=("seconds_p50",),
    ),
    "strategies": Bench(
        question="How do the ways of data parallelism train?",
        words="The same model on the same batches, each strategy written in the simplest way. Averaged parameters"
        " differ from the others, which differ by rounding.",
        command="python -m bench.strategies --ranks {ranks}",
        labels=("strategy",),
        values=("losses",),
        axis="step",
        hidden=("formula",),
    ),
    "strategies-batch": Bench(
        question="What does a larger batch change?",
        words="Loss over samples, with the learning rate kept, scaled with the batch, and scaled after a warm-up.",
        command="python -m bench.strategies",
        labels=("batch", "rule", "lr"),
        values=("losses",),
        axis="samples",
    ),
    "strategies-accumulation": Bench(
        question="Are accumulated gradients those of the large batch?",
        words="How far each is from the exact gradient, as a part of it. A tolerance of 1 is as much as is allowed.",
        command="python -m bench.strategies --what batch",
    ),
    "kernels": Bench(
        question="How fast are the kernels?",
        words="Share of the memory bandwidth that PyTorch's add_ reaches in the same rounds. An operator with another"
        " mix of reads and writes can be above 1.",
        command="python -m bench.kernels",
        labels=("system", "operation", "format"),
        values=("share",),
        hidden=("ceiling_gbps",),
    ),
    "formats": Bench(
        question="What do the state formats change in training?",
        words="Losses of a small GPT; the difference from the exact run as a part of the spread of exact runs from"
        " other weights. Above 1 a format does not pass.",
        command="python -m bench.formats.states",
        labels=("run",),
        values=("of_chance",),
    ),
    "quantized": Bench(
        question="What do quantized gathers change?",
        words="Losses of a small GPT, and the bytes that a rank sends in a step.",
        command="python -m bench.formats.quantized --ranks {ranks}",
        labels=("seed",),
        values=("validation_loss", "bytes_per_step"),
    ),
    "largest": Bench(
        question="Which model is the largest that fits?",
        words="The largest GPT that trains within the budget, found by trying.",
        command="python examples/largest_model.py --gigabytes 1",
        values=("parameters", "bytes_per_parameter"),
        headline=Headline(
            key="bytes_per_parameter",
            where={"system": "ShardLite, in_backward, split24, int8"},
            words="bytes per parameter, with in_backward, split24 and int8",
        ),
    ),
    "gpu": Bench(
        question="What did one GPU do?",
        words="In fake8 and host the GPU is rank 0 of eight, and each collective is a sleep of its stream (in host,"
        " nothing), for FSDP2 too. nccl, twin and compiled are one rank, so nothing travels. In pair, ranks share it.",
        command="python -m bench.gpu --only {probe}",
        labels=("system", "kernel", "format", "collective", "connection", "transport", "compiled", "ranks", "status"),
        values=("ms_p50", "peak_bytes", "us"),
        hidden=("dry", "source"),
        headline=Headline(
            key="ms_p50_vs_fsdp2", where={"system": "exact"}, words="of FSDP2's step, as rank 0 of eight, seven fake"
        ),
    ),
    "suite": Bench(
        question="How did the benches end?",
        command="python -m bench",
        labels=("suite",),
        values=("seconds",),
    ),
}

_HIDDEN = {"bench", "words", *PROVENANCE}


def bench_of(name: str, rows: Sequence[Row]) -> Bench:
    """Return how the rows of a bench are shown: for one that is not known, by the first number that its rows have."""
    if name in BENCHES:
        return BENCHES[name]
    keys = [key for key in keys_of(rows) if key not in _HIDDEN and key not in NOISE and key not in SETTINGS]
    labels = [key for key in keys if any(isinstance(row.get(key), str) for row in rows)]
    times = [key for key in keys if key.endswith("_p50")]
    values = [key for key in keys if all(row.get(key) is None or is_number(row[key]) for row in rows)]
    return Bench(
        question=f"What does {name} measure?",
        command=str(rows[0].get("command", "")),
        labels=tuple(labels),
        values=tuple((times or values)[:1]),
    )
