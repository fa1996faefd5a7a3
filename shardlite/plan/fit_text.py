"""Describe runs that fit: bytes, time, and the lines of Python to write."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardlite.config import MemoryLimit, Precision
from shardlite.plan.clusters import Cluster
from shardlite.plan.planner import Planner, RankPlan, Setting
from shardlite.plan.step_time import StepTime

_DEFAULTS = {
    "precision": Precision(),
    "reshard_after_forward": True,
    "prefetch": 1,
    "state": "fp32",
    "in_backward": False,
    "offload": None,
}


def arguments(setting: Setting) -> dict[str, Any]:
    """Return the keyword arguments of `ShardLite` of a run, without the memory limit."""
    return {
        "stage": setting.stage,
        "precision": setting.precision,
        "reshard_after_forward": setting.reshard_after_forward,
        "prefetch": setting.prefetch,
        "offload": None if setting.offload is None else setting.offload.argument,
    }


def size(nbytes: float) -> str:
    """Return bytes in decimal units, with three digits."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{max(0, 3 - len(str(int(nbytes / unit))))}f} {name}"
    return f"{nbytes} bytes"


def heading(planner: Planner, start: Setting, nbytes: int, count: int) -> str:
    """Return the line above the runs of a search."""
    rows = (start.rows or 0) * start.accumulate
    ranks, batch = _count(start.world_size, "rank"), _count(rows, "row")
    runs = "the only run that fits" if count == 1 else f"the {count} cheapest runs that fit"
    source = planner.source
    return f"{source.name} on {ranks}, {source.words}, {batch} per rank and step, {size(nbytes)} per rank: {runs}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def paragraph(
    plan: RankPlan, rules: Sequence[str], step: StepTime, cluster: Cluster | None, written: Sequence[str]
) -> str:
    """Describe one run.

    Args:
        plan: the predicted bytes.
        rules: the changes of numbers, in words.
        step: the predicted time, which is given only if there is a `cluster`.
        cluster: the cluster of the prediction.
        written: the lines of Python of the run.
    """
    sent = plan.sent_by_gathers + plan.sent_by_reductions
    parts = [f"{size(plan.peak)} at the peak", f"{size(sent)} sent per step" if sent else "nothing sent"]
    if plan.host_nbytes:
        copied = f"{size(plan.host_traffic)} copied each way per step"
        parts.append(f"{size(plan.host_nbytes)} of states in host memory, {copied}")
    if cluster is not None:
        time = f"{step.total:.3g} s" if step.total >= 1 else f"{step.total * 1e3:.3g} ms"
        parts.append(f"{time} per step on {cluster.name} (predicted, not measured)")
    changes = [f"changes numbers: {'; '.join(rules)}"] if rules else []
    return "\n   ".join([", ".join(parts), *changes, *written])


def lines(
    setting: Setting, shardlite: Mapping[str, Any], adamw: Mapping[str, Any], classes: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of Python of a run.

    Args:
        setting: the run.
        shardlite: keyword arguments of `ShardLite`.
        adamw: keyword arguments of `AdamW`.
        classes: names of the classes of the blocks that are recomputed.
    """
    if setting.checkpoint:
        names = repr(tuple(classes)) if len(classes) > 1 else f"({classes[0]!r},)" if classes else "()"
        yield f"apply_activation_checkpointing(model, check_fn=lambda each: type(each).__name__ in {names})"
    yield f"model = {_call('ShardLite', 'model', shardlite)}"
    yield f"optimizer = {_call('AdamW', 'model.parameters()', adamw)}"
    count, rows = setting.accumulate, setting.rows or 0
    if count > 1:
        context = f"model.no_sync({'sharded=True' * setting.sharded})"
        yield f"for part in range({count}):  # micro-batches of {_count(rows, 'row')}"
        yield f"    with {context} if part < {count - 1} else nullcontext():"
        yield f"        (loss_of(part) / {count}).backward()"


def _call(name: str, first: str, given: Mapping[str, Any]) -> str:
    """Return a call with the arguments that differ from their defaults."""
    words = [f"{key}={_value(value)}" for key, value in given.items() if _DEFAULTS.get(key, ...) != value]
    return f"{name}({', '.join(filter(None, [first, *words]))})"


def _value(value: Any) -> str:
    if isinstance(value, Precision | MemoryLimit):
        default = Precision() if isinstance(value, Precision) else MemoryLimit(nbytes=value.nbytes)
        differing = {key: each for key, each in vars(value).items() if key == "nbytes" or each != getattr(default, key)}
        return _call(type(value).__name__, "", differing)
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))}{',' * (len(value) == 1)})"
    return getattr(value, "__name__", None) or repr(value)


def nothing_fits(planner: Planner, plan: RankPlan, nbytes: int, keep: frozenset[str]) -> str:
    """Return the message of a search that found nothing. `plan` is the run that needs the least memory."""
    setting = plan.setting
    held = sorted(plan.by_purpose.items(), key=lambda item: -item[1])
    purposes = ", ".join(f"{purpose} {size(each)}" for purpose, each in held)
    adamw = {"state": setting.state, "in_backward": setting.in_backward}
    run = lines(setting, arguments(setting), adamw, planner.recomputed_classes)
    remedy = f"allow more than keep={sorted(keep)}, use more ranks" if keep else "use more ranks"
    return (
        f"nothing fits in {size(nbytes)}: on {_count(setting.world_size, 'rank')}, the smallest "
        f"run holds {size(plan.peak)} at its peak, most of it for {held[0][0]}: {purposes}. What to change: {remedy}, "
        f"or smaller inputs. The smallest run, with {_count(setting.rows or 0, 'row')} in a micro-batch:\n"
        + "\n".join(f"   {line}" for line in run)
    )
