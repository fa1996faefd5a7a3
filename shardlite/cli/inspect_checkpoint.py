"""Describe a checkpoint for `shardlite inspect`: each tensor, or a summary in which equal blocks share a line."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardlite.checkpoint import REMEDY, Checkpoint, check_blocks, find
from shardlite.errors import CheckpointError, some_of

_PARTS, _GROUPS, _DAMAGES = 9, 3, 5
"""Maximum numbers of lines for parts of the model, groups of the optimizer and damaged files."""

_WIDTH = 80
_OPTIONS = ("lr", "betas", "momentum", "weight_decay")
_HEAD = ("part of the model", "blocks", "tensors", "elements", "dtype", "weights", "state")

Tensors = Mapping[str, TensorStorageMetadata]


def inspect(path: str | os.PathLike[str], *, check: bool = True, every: bool = False) -> Iterator[str]:
    """Yield lines that describe a checkpoint.

    Args:
        path: the folder of a checkpoint, or the folder of a run. For a run, the newest checkpoint is described.
        check: whether to read all files and compare their checksums.
        every: whether to list each tensor instead of the parts of the model.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or damaged. The files are checked after all
            other lines have been yielded.
    """
    checkpoint = Checkpoint(find(Path(path)))
    yield f"{checkpoint.folder}"
    saved = checkpoint.manifest
    if saved is None:
        yield "written by torch.distributed.checkpoint"
    else:
        yield "step {step}, saved by {ranks} ranks at stage {stage}, format {format}".format(**saved)
        if kept := saved.get("kept"):
            yield f"kept in a dtype of their own, beside the compute dtype: {some_of(kept)}"
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
    """Yield a table with a line for each part of the model, and a line for the whole model."""
    weights = {name.removeprefix("model."): each for name, each in tensors.items() if not name.startswith("optimizer.")}
    state: Counter[str] = Counter()
    for name, each in tensors.items():
        if param := _state_of(checkpoint, name):
            state[param] += _nbytes(each)
    rows = [_HEAD]
    for (title, blocks), names in (*_titled(weights).items(), (("all", ""), list(weights))):
        nbytes = sum(state[name] for name in names)
        rows.append((title, blocks, *_sums([weights[name] for name in names]), _amount(nbytes) if nbytes else "-"))
    yield from _table(rows)


def _sums(held: Sequence[TensorStorageMetadata]) -> tuple[str, str, str, str]:
    """Return the table cells of some weights: numbers of weights and elements, main dtype by bytes, and all bytes."""
    dtypes: Counter[str] = Counter()
    for each in held:
        dtypes[_dtype(each)] += _nbytes(each)
    most = "".join(dtype for dtype, _ in dtypes.most_common(1))
    more = f" +{len(dtypes) - 1}" if len(dtypes) > 1 else ""
    return f"{len(held)}", _compact(sum(each.size.numel() for each in held)), most + more, _amount(dtypes.total())


def _titled(weights: Tensors) -> dict[tuple[str, str], list[str]]:
    """For each line of the table, return the names of its weights. A key is the title and the number of equal blocks.

    If there would be too many lines, each outermost module has a line instead.
    """
    modules: dict[tuple[str, int | None], list[str]] = {}
    for name in weights:
        modules.setdefault(_module_of(name), []).append(name)
    alike: dict[object, list[tuple[str, int | None]]] = {}  # modules by the names, shapes and dtypes of their weights
    for (stem, number), names in modules.items():
        inside = [name.removeprefix(f"{stem}.").partition(".")[2] for name in names]
        shapes = [(tuple(weights[name].size), _dtype(weights[name])) for name in names]
        alike.setdefault((stem, number is None, frozenset(zip(inside, shapes, strict=True))), []).append((stem, number))
    found = {}
    for equal in alike.values():
        numbers = [number for _, number in equal if number is not None]
        title = f"{equal[0][0]}.{_ranges(numbers)}".strip("."), f"{len(numbers) or ''}"
        found[title] = [name for module in equal for name in modules[module]]
    if len(found) <= _PARTS:
        return found
    outer: dict[tuple[str, str], list[str]] = {}
    for name in weights:
        outer.setdefault((name.partition(".")[0], ""), []).append(name)
    return outer


def _module_of(name: str) -> tuple[str, int | None]:
    """Return the outermost numbered block that holds the weight, as stem and number. Without one, return the innermost
    module.

    `h.3.mlp.weight` belongs to `("h", 3)`, and `norm.weight` belongs to `("norm", None)`.
    """
    if block := re.match(r"(?:(.*?)\.)??(\d+)(?:\.|$)", name):
        return block[1] or "", int(block[2])
    return name.rpartition(".")[0] or name, None


def _ranges(numbers: Sequence[int]) -> str:
    """Format the numbers of blocks as ranges: `0-3,5`. Of more than three ranges, show the first two and the last."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(words if len(words) <= 3 else [*words[:2], "..", words[-1]])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines with aligned columns. A title that does not fit into `_WIDTH` is abbreviated."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = min(widths[0], _WIDTH - sum(2 + width for width in widths[1:]) - 2)
    for title, *cells in rows:
        short = title if len(title) <= first else f"{title[: first // 3]}..{title[first // 3 + 2 - first :]}"
        yield f"  {short:{first}}  {'  '.join(map(str.rjust, cells, widths[1:]))}".rstrip()


# ---- inspect: optimizer ---------------------------------------------------------------------------------------------


def _optimizer(checkpoint: Checkpoint, tensors: Tensors) -> Iterator[str]:
    """Yield lines that describe the optimizer: the entries of its state, and its groups."""
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
    """Return the name of the checkpoint entry for each option of each group of the optimizer."""
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint.entries:
        keys = tuple(map(str, checkpoint.path_of(name)))
        if keys[:2] == ("optimizer", "param_groups") and len(keys) == 4:
            found.setdefault(keys[2], {})[keys[3]] = name
    return found


def _group(checkpoint: Checkpoint, options: Mapping[str, str]) -> str:
    """Format the number of parameters and the main options of a group."""
    try:
        read = {key: checkpoint.object(options[key]) for key in ("params", *_OPTIONS) if key in options}
    except CheckpointError:
        return "cannot be read"
    params = read.pop("params", ())
    return ", ".join([_count(len(params), "parameter"), *(f"{key} {_value(value)}" for key, value in read.items())])


def _value(value: object) -> str:
    """Format the value of an option. Numbers have at most six digits."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value, value))})"
    return f"{float(value):g}" if isinstance(value, (float, Tensor)) else str(value)


def _state_of(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the name of the parameter to which a tensor of the optimizer state belongs. `None` for other tensors."""
    keys = checkpoint.path_of(name)
    return ".".join(map(str, keys[2:-1])) if keys[:2] == ("optimizer", "state") else None


# ---- inspect: files -------------------------------------------------------------------------------------------------


def _checks(checkpoint: Checkpoint) -> Iterator[str]:
    """Compare all files with their checksums. Yield a line with the result, or a line for each damaged file."""
    if checkpoint.manifest is None:
        checkpoint.check(checkpoint.object_items(checkpoint.entries))
        yield "all files have their lengths; there are no checksums"
        return
    files, damages = checkpoint.manifest["files"], []
    for name, sums in files.items():
        try:
            check_blocks(checkpoint.folder, checkpoint.manifest, {name: [(0, sums["size"])]})
        except CheckpointError as error:
            damages.append(str(error).removesuffix(f". {REMEDY}"))
    yield from (f"DAMAGED: {each}" for each in damages[:_DAMAGES])
    if damages:
        raise CheckpointError(f"{len(damages)} of {_count(len(files), 'file')} are missing or damaged")
    nbytes = sum(sums["size"] for sums in files.values())
    yield f"all {len(files)} files ({_amount(nbytes)}) have the checksums with which they were written"


# ---- inspect: text --------------------------------------------------------------------------------------------------


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
