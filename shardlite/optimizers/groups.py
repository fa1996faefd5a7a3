"""Parameter groups of the program, divided into whole and elementwise parameters, and checked."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.errors import check_params
from shardlite.optim import AdamW
from shardlite.optimizers.members import Member, placeholder
from shardlite.optimizers.states import WholeStateOptimizer

Group = dict[str, Any]
Rule = Callable[[str, Sequence[int]], bool]
"""A function of a parameter's name and shape that returns whether the parameter is stepped whole."""

_TENSORS = ("params", "param_names")
_NO_MATRIX = re.compile(
    r"embed|(^|[._])emb([._]|$)|wte|wpe|(^|[._])position|attention_bias"
    r"|(?<![a-z])([a-z]+_)?head([._]|$)|classifier|^(\D*\.)?(shared|output|score)\.weight$",
    re.IGNORECASE,
)
"""Words in the names of embeddings, tables of positions, and heads."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is a matrix, and neither an embedding nor a head by its name.

    These are the parameters for which Muon is meant (https://kellerjordan.github.io/posts/muon).
    """
    return len(shape) == 2 and not _NO_MATRIX.search(name)


def options_of(group: Mapping[str, Any]) -> Group:
    """Return the options of a parameter group, without the parameters."""
    return {option: value for option, value in group.items() if option not in _TENSORS}


@dataclass(eq=False)
class Part:
    """A parameter group whose parameters are all stepped whole, or all elementwise."""

    whole: bool
    options: Group
    """The options that the program has given. `fill` adds the others."""

    params: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    members: list[Member | None] = field(default_factory=list)
    """`None` for an ignored parameter, of which every rank has its own copy."""

    @property
    def fact(self) -> str:
        """A description that must be equal on all ranks."""
        plain = (bool, int, float, str, tuple, type(None))
        options = {name: value for name, value in sorted(self.options.items()) if isinstance(value, plain)}
        kind = "whole" if self.whole else "elementwise"
        return f"a group of {kind} parameters {', '.join(self.names)} with the options {options}"

    def placeholders(self) -> list[nn.Parameter]:
        """Return a parameter of the whole shape for each parameter. It takes the memory of one element."""
        return [*map(placeholder, self.params, self.members)]

    def fill(self, group: Mapping[str, Any]) -> None:
        """Add the options of a group that the class has built."""
        self.options = options_of(group)

    def group(self, *, named: bool) -> Group:
        """Return the group for the constructor of `Optimizer`."""
        params = [*zip(self.names, self.params, strict=True)] if named else self.params
        return {**self.options, "params": params}


def check_class(kind: object) -> None:
    """Check that `kind` is a class of optimizers that `WholeParameters` can use.

    Raises:
        TypeError: it is not.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(
            f"WholeParameters: optimizer_class must be a subclass of torch.optim.Optimizer, got {kind!r}: pass the "
            "class, and its options as keywords"
        )
    if issubclass(kind, AdamW | WholeStateOptimizer):
        raise TypeError(f"WholeParameters: {kind.__name__} steps shards itself: use it without WholeParameters")


def check_elementwise(options: Mapping[str, Any]) -> None:
    """Check the options of the parameters that `shardlite.AdamW` steps.

    Raises:
        TypeError: an option is unknown, or cannot be combined with `WholeParameters`.
    """
    known = ("lr", "betas", "eps", "weight_decay", "max_update")
    unknown = [option for option in options if option not in known]
    if unknown:
        raise TypeError(
            f"WholeParameters: elementwise takes the options {', '.join(known)} of shardlite.AdamW, and `state` in the "
            f"constructor, got {unknown[0]!r}"
        )


class Given(NamedTuple):
    """A parameter group as the program has passed it."""

    params: list[tuple[str | None, Tensor]]
    options: Group
    named: bool


def groups_in(params: Any) -> list[Given]:
    """Return the parameter groups in the argument of an optimizer's constructor.

    Raises:
        TypeError: an entry is not a parameter.
        ValueError: there are no parameters, or a group has none.
    """
    if not isinstance(params, Iterable):
        raise TypeError(
            f"WholeParameters: params must be parameters() of the ShardLite model, or groups, got {params!r}"
        )
    given: list[Any] = [params] if isinstance(params, Tensor | dict) else list(params)
    if not given:
        raise ValueError("WholeParameters: the list of parameters is empty")
    dicts = given if isinstance(given[0], dict) else [{"params": given}]
    groups = []
    for number, group in enumerate(dicts):
        check_params("WholeParameters", group)
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not entries:
            raise ValueError(
                f"WholeParameters: group {number} has no parameters. `parameters()` of the ShardLite model are shards, "
                "which are other objects than the module's parameters: choose by name or by `p.ndim`"
            )
        named = isinstance(entries[0], tuple)
        pairs: list[Any] = entries if named else [(None, each) for each in entries]
        wrong = next((param for _, param in pairs if not isinstance(param, Tensor)), None)
        if wrong is not None:
            raise TypeError(f"WholeParameters: group {number} must have tensors, got {type(wrong).__name__}")
        groups.append(Given(pairs, options_of(group), named))
    return groups


def divided(
    groups: Sequence[Given],
    elementwise: Mapping[str, Any] | None,
    rule: Rule | None,
    members: Mapping[Tensor, Member],
    held: Iterable[Tensor],
) -> list[Part]:
    """Divide each group into its whole parameters and its elementwise parameters, and leave out empty parts.

    Args:
        groups: parameter groups.
        elementwise: options of the elementwise parameters. `None`: all parameters are whole.
        rule: selects the whole parameters.
        members: the parameters of all wrapped models.
        held: parameters that the optimizer has already.

    Raises:
        ValueError: a parameter occurs twice.
    """
    seen = set(held)
    parts = []
    for options, pairs in ((each.options, each.params) for each in groups):
        given = {option: value for option, value in options.items() if option != "elementwise"}
        whole = Part(whole=True, options=given)
        own = options.get("elementwise", {})
        if elementwise is None and own:
            raise TypeError("WholeParameters: a group has an entry `elementwise`: also pass elementwise={...}")
        check_elementwise(own)
        rest = Part(whole=False, options={**(elementwise or {}), **own})
        for number, (name, param) in enumerate(pairs):
            member = members.get(param)
            known, shape = (name or f"ignored {number}", param.shape) if member is None else (member.name, member.shape)
            if param in seen:
                raise ValueError(f"WholeParameters: parameter {known!r} occurs twice")
            seen.add(param)
            part = whole if elementwise is None or (rule or is_hidden_matrix)(known, tuple(shape)) else rest
            part.params.append(param)
            part.names.append(known)
            part.members.append(member)
        if given and not whole.params:
            raise ValueError(
                f"WholeParameters: a group has the options {', '.join(given)}, but AdamW steps all of its parameters: "
                "pass these options in the group's entry `elementwise`"
            )
        parts += [part for part in (whole, rest) if part.params]
    return parts
