"""Format a plan as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardlite.lab.table import aligned
from shardlite.optimizers import Owned, assign, describe, is_hidden_matrix, ranges_of
from shardlite.plan import ACTIVATIONS, MOST_RANKS, Cluster, Fit, Planner, RankPlan, Scaling, Setting, simulate

COLUMNS = {
    "weights": ("parameters",),
    "optimizer": ("optimizer state", "offload buffers"),
    "gradients": ("gradients",),
    "buckets": ("gradient buckets",),
    "gathered": ("gather buffers",),
    "other": ("buffers", "staging", "chunks of a step"),
    "activations": (ACTIVATIONS,),
}
"""For each column of the table, the purposes whose bytes the column adds up."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Plans that differ only in the number of ranks, in ascending order."""

    plans: Sequence[RankPlan]
    curve: Sequence[Scaling] = ()
    fewest: int | None = None
    """The smallest number of ranks with which the memory of a rank fits the card."""

    @property
    def setting(self) -> Setting:
        """The setting of all plans, except for the number of ranks."""
        return self.plans[0].setting


def by_column(held: Mapping[str, int]) -> dict[str, int]:
    """Convert bytes by purpose to bytes by column."""
    return {title: sum(held.get(each, 0) for each in purposes) for title, purposes in COLUMNS.items()}


def text(
    planner: Planner, groups: Sequence[Group], cluster: Cluster | None, card: int | None, *, owners: bool = False
) -> str:
    """Format all groups for a terminal."""
    lines = [*_head(planner, cluster)]
    for group in groups:
        lines += ["", words(group.setting), *_table(group, cluster, card)]
        if card is not None and group.fewest is None:
            lines.append(f"does not fit in {_gb(card)} GB at any number of ranks up to {MOST_RANKS}")
        elif card is not None:
            lines.append(f"fewest ranks that fit in {_gb(card)} GB: {group.fewest}")
    if owners:
        stages = {group.setting.stage: group for group in groups}
        lines += [line for group in stages.values() for plan in group.plans for line in _owners(planner, plan.setting)]
    return "\n".join(lines)


def words(setting: Setting) -> str:
    """Describe a setting, except for its number of ranks."""
    precision = setting.precision
    computing = "fp32" if precision.compute is None else str(precision.compute).removeprefix("torch.")
    parts = [
        f"stage {setting.stage}",
        f"compute in {computing}",
        "" if precision.keep is None else f"keep={precision.keep}",
        'master="split24"' if precision.master == "split24" else "",
        f"reduce in {str(precision.reduce).removeprefix('torch.')}",
        f'AdamW(state="{setting.state}"{", in_backward=True" * setting.in_backward})',
        f"prefetch {setting.prefetch}" if setting.stage == 3 else "",
        "" if setting.offload is None else f"offload={setting.offload.argument}",
        'algorithm="hierarchical"' * setting.hierarchical,
        "" if setting.reshard_after_forward else "weights kept until the backward",
        "with activation checkpointing" if setting.checkpoint else "without activation checkpointing",
    ]
    return ", ".join(filter(None, parts))


def as_json(planner: Planner, groups: Sequence[Group], cluster: Cluster | None, card: int | None) -> dict[str, Any]:
    """Return all groups as plain data, in bytes and seconds."""
    return {
        "model": planner.source.name,
        "batch": planner.source.words,
        "parameters": planner.numel,
        "trainable": planner.trainable,
        "units": planner.unit_names,
        "card_bytes": card,
        "cluster": None if cluster is None else {"name": cluster.name, "source": cluster.source},
        "predicted": "not measured",
        "groups": [
            {
                "setting": words(group.setting),
                "fewest_ranks": group.fewest,
                "scaling": [asdict(each) for each in group.curve],
                "ranks": [_plan_json(plan, cluster) for plan in group.plans],
            }
            for group in groups
        ],
    }


def fit_json(fit: Fit) -> dict[str, Any]:
    """Return a run that fits as plain data, in bytes and seconds."""
    return {
        "setting": words(fit.plan.setting),
        "micro_batch": fit.micro_batch,
        "accumulate": fit.accumulate,
        "changes_numbers": fit.rules,
        "limit_bytes": fit.memory_limit.nbytes,
        **_plan_json(fit.plan, fit.cluster),
        "lines": fit.lines,
    }


def _plan_json(plan: RankPlan, cluster: Cluster | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "ranks": plan.setting.world_size,
        "peak_bytes": plan.peak,
        "peak_bytes_at_least": plan.at_least,
        "bytes": plan.by_purpose,
        "activation_peak_bytes": plan.activations,
        "sent_by_gathers": plan.sent_by_gathers,
        "sent_by_reductions": plan.sent_by_reductions,
        "host_bytes": plan.host_nbytes,
        "host_traffic": plan.host_traffic,
    }
    if cluster is not None:
        step = simulate(plan, cluster)
        row |= {"seconds": asdict(step) | {"exposed": step.exposed}}
    return row


def _head(planner: Planner, cluster: Cluster | None) -> Iterator[str]:
    units = planner.unit_names
    yield (
        f"{planner.source.name}: {planner.numel:,} parameters, {planner.trainable:,} of them trained, in {len(units)} "
        f"unit{'s' * (len(units) != 1)}; {planner.source.words}"
    )
    if cluster is not None:
        yield f"cluster {cluster.name}: {cluster.source}"
        yield f"card {cluster.card.name}: {cluster.card.source}"
        yield "step and exposed communication are predictions, not measurements"


def _table(group: Group, cluster: Cluster | None, card: int | None) -> list[str]:
    """Return lines with a row for each number of ranks. Bytes are in GB (10^9), at the moment of the peak."""
    rows = [_row(plan, group, cluster, card) for plan in group.plans]
    return ["GB per rank at the peak:", aligned([list(rows[0]), *(list(row.values()) for row in rows)], words=0)]


def _row(plan: RankPlan, group: Group, cluster: Cluster | None, card: int | None) -> dict[str, str]:
    """Return the table cells for one number of ranks, by the title of the column."""
    row = {"ranks": f"{plan.setting.world_size}"}
    row |= {title: _gb(nbytes) for title, nbytes in by_column(plan.by_purpose).items()}
    row["peak"] = _gb(plan.peak)
    if card is not None:
        row["fits"] = "yes" if plan.peak <= card else "no"
    row["sent/step"] = _gb(plan.sent_by_gathers + plan.sent_by_reductions)
    if plan.setting.offload is not None:
        row["on host"], row["each way/step"] = _gb(plan.host_nbytes), _gb(plan.host_traffic)
    if cluster is not None:
        step = simulate(plan, cluster)
        weak = next(each.weak for each in group.curve if each.world_size == plan.setting.world_size)
        row["step, ms"], row["exposed, ms"] = f"{step.total * 1e3:.1f}", f"{max(step.exposed, 0) * 1e3:.1f}"
        row["efficiency"] = f"{weak:.0%}"
    return row


def _owners(planner: Planner, setting: Setting) -> Iterator[str]:
    """Yield lines with what each rank owns if `WholeParameters` steps the matrices."""
    matrices, ranks = owners_of(planner, setting), setting.world_size
    yield ""
    yield f"owners in WholeParameters at stage {setting.stage}, {ranks} ranks:{'' if matrices else ' no matrices'}"
    if not matrices:
        return
    yield from (f"  {line}" for line in describe(matrices))
    sent = [
        max(sum(each.nbytes_sent(rank, *sizes) for each in matrices) for rank in range(ranks))
        for sizes in ((8, 4), (2, 2))
    ]
    yield f"  sent per rank and step, at most: {_gb(sent[0])} GB; by torch.optim.Muon in bf16: {_gb(sent[1])} GB"


def owners_of(planner: Planner, setting: Setting) -> list[Owned]:
    """Return the trained matrices, without embeddings and heads, with their owners in `WholeParameters`."""
    plan, found = planner.units(setting), list[Owned]()
    for unit, flats in zip(plan.units, plan.flats, strict=True):
        for layout in (flat.layout for flat in flats if flat.layout.trainable):
            for index, slot in enumerate(layout.slots):
                if is_hidden_matrix(slot.name, slot.shape):
                    ranges = ranges_of(layout, index, whole=setting.stage == 0)
                    owned = Owned(name=slot.name, unit=unit.name, shape=slot.shape, ranges=ranges, place=len(found))
                    found.append(owned)
    if found:
        assign(found)
    return found


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes < 1e11 else f"{nbytes / 1e9:.0f}"
