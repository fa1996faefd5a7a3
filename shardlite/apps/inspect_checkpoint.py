"""`shardlite inspect` as a function: a summary in which equal blocks share a line, or a line for each tensor."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardlite.checkpoint import REMEDY, Checkpoint, check_blocks, find
from shardlite.errors import CheckpointError

_PARTS, _GROUPS, _DAMAGES = 9, 3, 5
"""Lines for parts of the model, groups of the optimizer and damaged files, so that a summary has about 20 lines."""

_WIDTH = 80
_OPTIONS = ("lr", "betas", "momentum", "weight_decay")
_HEAD = ("part of the model", "blocks", "tensors", "elements", "dtype", "weights", "state")

Tensors = Mapping[str, TensorStorageMetadata]


def inspect(path: str | os.PathLike[str], *, check: bool = True, every: bool = False) -> Iterator[str]:
    """Yield lines about the newest checkpoint of a run, or about one checkpoint.

    Args:
        path: the folder of the run, or of the checkpoint.
        check: whether to read all files and compare their checksums.
        every: whether to list each tensor instead of the parts of the model.

    Raises:
        CheckpointError: there is none, or (after the lines that describe it) a file is missing or damaged.
    """
    checkpoint = Checkpoint(find(Path(path)))
    told = checkpoint.manifest
    yield f"{checkpoint.folder}"
    if told is None:
        yield "written by torch.distributed.checkpoint"
    else:
        yield f"step {told['step']}, saved by {told['ranks']} ranks at stage {told['stage']}, format {told['format']}"
    tensors = {name: each for name, each in checkpoint.entries.items() if isinstance(each, TensorStorageMetadata)}
    yield from _every(tensors) if every else _parts(checkpoint, tensors)
    yield from _optimizer(checkpoint, tensors)
    if ranks := sorted({key[1] for key in map(checkpoint.path_of, checkpoint.entries) if key[0] == "ranks"}):
        yield f"extra and states of random number generators of {_count(len(ranks), 'rank')}"
    if check:
        yield from _checks(checkpoint)


def _every(tensors: Tensors) -> Iterator[str]:
    """Yield a line for each tensor."""
    width = max(map(len, tensors), default=0)
    for name, each in tensors.items():
        shape, parts = str([*each.size]), _count(len(each.chunks), "part")
        yield f"  {name:{width}}  {shape:16}  {_dtype(each):8}  {_amount(_nbytes(each)):>9}  {parts}"


# ---- inspect: parts of the model ------------------------------------------------------------------------------------


def _parts(checkpoint: Checkpoint, tensors: Tensors) -> Iterator[str]:
    """Yield a table with a line for each part of the model, and one for the whole model."""
    weights = {name.removeprefix("model."): each for name, each in tensors.items() if not _is_optimizers(name)}
    state: Counter[str] = Counter()
    for name, each in tensors.items():
        if param := _state_of(checkpoint, name):
            state[param] += _nbytes(each)
    rows = [_HEAD]
    for (title, blocks), names in (*_titled(weights).items(), (("all", ""), list(weights))):
        nbytes = sum(state[name] for name in names)
        rows.append(
            (title, blocks, *_sums({name: weights[name] for name in names}), _amount(nbytes) if nbytes else "-")
        )
    yield from _table(rows)


def _sums(held: Tensors) -> tuple[str, str, str, str]:
    """Return the cells of some weights: their number, elements, most frequent dtype, and bytes."""
    dtypes: Counter[str] = Counter()
    for each in held.values():
        dtypes[_dtype(each)] += _nbytes(each)
    most = next((dtype for dtype, _ in dtypes.most_common(1)), "")
    more = f" +{len(dtypes) - 1}" if len(dtypes) > 1 else ""
    numel = sum(each.size.numel() for each in held.values())
    return f"{len(held)}", _compact(numel), most + more, _amount(dtypes.total())


def _titled(weights: Tensors) -> dict[tuple[str, str], list[str]]:
    """Return the names of the weights of each line of a table, by its title and the number of equal blocks in it."""
    modules: dict[tuple[str, int | None], list[str]] = {}
    for name in weights:
        modules.setdefault(_module_of(name), []).append(name)
    alike: dict[tuple[str, object], list[int | None]] = {}
    for (stem, number), names in modules.items():
        shapes = None if number is None else frozenset(_kind(weights, stem, name) for name in names)
        alike.setdefault((stem, shapes), []).append(number)
    found = {}
    for (stem, _), numbers in alike.items():
        title = f"{stem}.{_ranges(numbers)}".strip("."), "" if None in numbers else f"{len(numbers)}"
        found[title] = [name for number in numbers for name in modules[stem, number]]
    return found if len(found) <= _PARTS else _fewer(weights)


def _module_of(name: str) -> tuple[str, int | None]:
    """Return the module that holds a weight: the block, as its stem and number, or else the innermost module.

    `h.3.mlp.weight` is in `("h", 3)`, `norm.weight` in `("norm", None)`.
    """
    keys = name.split(".")
    for place, key in enumerate(keys):
        if key.isdecimal():
            return ".".join(keys[:place]), int(key)
    return ".".join(keys[:-1]) or name, None


def _kind(weights: Tensors, stem: str, name: str) -> tuple[str, tuple[int, ...], str]:
    """Return what equal blocks have in common: the name of a weight inside its block, its shape and its dtype."""
    inside = name.removeprefix(f"{stem}.").partition(".")[2]
    return inside, tuple(weights[name].size), _dtype(weights[name])


def _ranges(numbers: Sequence[int | None]) -> str:
    """Format the numbers of blocks: `0-3,5`. Of more than three runs show the first two and the last."""
    blocks = sorted(number for number in numbers if number is not None)
    runs = [[n for _, n in run] for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(words if len(words) <= 3 else [*words[:2], "..", words[-1]])


def _fewer(weights: Tensors) -> dict[tuple[str, str], list[str]]:
    """Return one line for each outermost module. Of too many, those with the least bytes share the last line."""
    outer: dict[str, list[str]] = {}
    for name in weights:
        outer.setdefault(name.partition(".")[0], []).append(name)
    largest = sorted(outer, key=lambda title: -sum(_nbytes(weights[name]) for name in outer[title]))
    kept = largest if len(largest) <= _PARTS else largest[: _PARTS - 1]
    others = [name for title in largest if title not in kept for name in outer[title]]
    found = {(title, ""): names for title, names in outer.items() if title in kept}
    return {**found, (_count(len(outer) - len(kept), "other"), ""): others} if others else found


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines of equal columns. What does not fit into `_WIDTH` is cut out of the first cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = min(widths[0], _WIDTH - sum(2 + width for width in widths[1:]) - 2)
    for title, *cells in rows:
        short = title if len(title) <= first else f"{title[: first // 3]}..{title[first // 3 + 2 - first :]}"
        yield f"  {short:{first}}  {'  '.join(map(str.rjust, cells, widths[1:]))}".rstrip()


# ---- inspect: optimizer ---------------------------------------------------------------------------------------------


def _optimizer(checkpoint: Checkpoint, tensors: Tensors) -> Iterator[str]:
    """Yield lines about the optimizer: what its state consists of, and its groups."""
    state = {name: param for name in tensors if (param := _state_of(checkpoint, name))}
    keys = dict.fromkeys(str(checkpoint.path_of(name)[-1]) for name in state)
    dtypes = dict.fromkeys(_dtype(tensors[name]) for name in state)
    params, groups = set(state.values()), _groups(checkpoint)
    if not params and not groups:
        yield "no optimizer"
        return
    held = f"{', '.join(keys)} in {', '.join(dtypes)}" if keys else "no state"
    yield f"optimizer: {held}, for {_count(len(params), 'parameter')} in {_count(len(groups), 'group')}"
    for number, options in list(groups.items())[:_GROUPS]:
        yield f"  group {number}: {_group(checkpoint, options)}"
    if len(groups) > _GROUPS:
        yield f"  and {_count(len(groups) - _GROUPS, 'other group')}"


def _groups(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Return the entry of each option of each group."""
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint.entries:
        keys = tuple(map(str, checkpoint.path_of(name)))
        if keys[:2] == ("optimizer", "param_groups") and len(keys) == 4:
            found.setdefault(keys[2], {})[keys[3]] = name
    return found


def _group(checkpoint: Checkpoint, options: Mapping[str, str]) -> str:
    """Return the number of parameters and the main options of a group."""
    try:
        read = {key: checkpoint.object(options[key]) for key in ("params", *_OPTIONS) if key in options}
    except CheckpointError:
        return "cannot be read"
    params = read.pop("params", ())
    return ", ".join([_count(len(params), "parameter"), *(f"{key} {_value(value)}" for key, value in read.items())])


def _value(value: object) -> str:
    """Format the value of an option, numbers with at most six digits."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value, value))})"
    return f"{float(value):g}" if isinstance(value, (float, Tensor)) else str(value)


def _is_optimizers(name: str) -> bool:
    return name.startswith("optimizer.")


def _state_of(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the parameter whose optimizer state a tensor is part of, if it is."""
    keys = checkpoint.path_of(name)
    return ".".join(map(str, keys[2:-1])) if keys[:2] == ("optimizer", "state") else None


# ---- inspect: files -------------------------------------------------------------------------------------------------


def _checks(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the result of a comparison of all files with their checksums: a line, or one for each damaged file."""
    told = checkpoint.manifest
    if told is None:
        checkpoint.check(checkpoint.object_items(checkpoint.entries))
        yield "all files have their lengths; there are no checksums"
        return
    damages = list(_damages(checkpoint.folder, told["files"], told))
    yield from (f"DAMAGED: {each}" for each in damages[:_DAMAGES])
    if damages:
        raise CheckpointError(f"{len(damages)} of {_count(len(told['files']), 'file')} are missing or damaged")
    nbytes = sum(sums["size"] for sums in told["files"].values())
    yield f"all {len(told['files'])} files ({_amount(nbytes)}) have the checksums with which they were written"


def _damages(folder: Path, sums: Mapping[str, Mapping[str, int]], told: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with each file that is missing or damaged."""
    for name in sums:
        try:
            check_blocks(folder, told, {name: [(0, sums[name]["size"])]})
        except CheckpointError as error:
            yield str(error).removesuffix(f". {REMEDY}")


# ---- inspect: words -------------------------------------------------------------------------------------------------


def _dtype(each: TensorStorageMetadata) -> str:
    return str(each.properties.dtype).removeprefix("torch.")


def _nbytes(each: TensorStorageMetadata) -> int:
    return each.size.numel() * each.properties.dtype.itemsize


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _compact(number: int) -> str:
    """Format a number of elements with three or four digits: `16,384` and `1.24 M`."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return f"{number:,}"


def _amount(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
