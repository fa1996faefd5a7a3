"""The state of one parameter, in the formats in which it is kept, saved and loaded.

An entry is a dict with `step` and the moments, in the parameter's shape. Moments in 8 bits also have exponents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from shardlite_kernels.moments import decode
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
EXPONENTS = ("exp_avg_exponent", "exp_avg_sq_exponent")


def check_state(param: Tensor, state: dict[str, Any] | None) -> None:
    """Check the state of `param`. An empty state is valid, as before the first step of a parameter.

    Raises:
        ValueError: the entries do not have AdamW's names, or a moment does not have the shape of `param`.
    """
    if not state:
        return
    names = {"step", *MOMENTS}
    if set(state) not in (names, names | set(EXPONENTS)):
        raise ValueError(f"AdamW: the state of a parameter must be step, {', '.join(MOMENTS)}, got {', '.join(state)}")
    for name in MOMENTS:
        if state[name].shape != param.shape:
            raise ValueError(
                f"AdamW: {name} has shape {tuple(state[name].shape)}, but its parameter has {tuple(param.shape)}"
            )


def check_dense(params: Iterable[Tensor]) -> None:
    """Raise `ValueError` if the gradient of a parameter is sparse."""
    for param in params:
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise ValueError(f"AdamW: gradients must be dense, got a {param.grad.layout} gradient")


def canonical(entry: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of one parameter with moments decoded to fp32. Decoding is exact.

    If `device` is given, decoded moments are moved to this device. If the moments are not bf16 or int8, the state is
    returned unchanged.
    """
    if not _is_narrow(entry):
        return dict(entry)
    avg, sq = (entry[name] for name in MOMENTS)
    flats = decode(avg.reshape(-1), sq.reshape(-1), *(entry.get(name) for name in EXPONENTS))
    moments = {name: m.view(avg.shape).to(device or m.device) for name, m in zip(MOMENTS, flats, strict=True)}
    return {"step": entry["step"], **moments}


Decoder = tuple[Callable[..., Tensor], Sequence[Tensor]]
"""A function that decodes a moment, and the tensors to decode."""


def decoders(entry: Mapping[str, Any]) -> dict[str, Decoder]:
    """Return a decoder for each moment, by name. A decoder returns the same moment as `canonical`.

    Return an empty dict if the moments are not bf16 or int8.
    """
    if not entry or not _is_narrow(entry):
        return {}
    codes = {name: value for name, value in entry.items() if name != "step"}

    def decode(name: str, *given: Tensor) -> Tensor:
        moment: Tensor = canonical({"step": None, **dict(zip(codes, given, strict=True))})[name]
        return moment

    return {name: (partial(decode, name), list(codes.values())) for name in MOMENTS}


def _is_narrow(entry: Mapping[str, Any]) -> bool:
    return MOMENTS[0] in entry and entry[MOMENTS[0]].dtype in (torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class Unconverted:
    """A value that PyTorch must not convert when it loads a state.

    PyTorch would round moments to the parameter's dtype, which is bf16 for split weights.
    """

    value: Any


def unconverted(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer, with all values `Unconverted`."""
    kept = {key: {name: Unconverted(value) for name, value in e.items()} for key, e in state_dict["state"].items()}
    return {**state_dict, "state": kept}


def convert(state: dict[str, Any]) -> None:
    """Undo `unconverted`, in place."""
    for entry in state["state"].values():
        entry.update({name: value.value for name, value in entry.items() if isinstance(value, Unconverted)})
