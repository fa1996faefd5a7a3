"""`WholeParameters`: any optimizer class of the program, on the shards of a wrapped model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import proxy

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from shardlite.comm import Context, StreamQueue, agree, problem_in
from shardlite.engine import OptimizerBridge, models_with
from shardlite.errors import LayoutError, ShardWarning
from shardlite.optim import AdamW, canonical, convert, load_entries, unconverted
from shardlite.optimizers.assignment import assign, describe
from shardlite.optimizers.groups import (
    Given,
    Group,
    Part,
    Rule,
    check_class,
    check_elementwise,
    divided,
    groups_in,
    options_of,
)
from shardlite.optimizers.hand_over import judge_whole
from shardlite.optimizers.instance import Instance, Marks, changed, marks_of
from shardlite.optimizers.members import Member, members_of
from shardlite.optimizers.pipeline import run
from shardlite.optimizers.probe import probe_closure, step_without_hooks
from shardlite.optimizers.states import WholeStateOptimizer
from shardlite.optimizers.steps import ClassStep, MuonStep, UnitStep, divides_muon, stand_in, step_stand_ins


class WholeParameters(WholeStateOptimizer):
    """Step whole parameters with an optimizer class that is not elementwise: Muon, SOAP, Shampoo, Adafactor, LAMB.

    Each parameter has one owner. The owner gets the pieces of the averaged gradient and of the weight from the other
    ranks, steps the whole parameter with `optimizer_class`, and sends the pieces of the new weight back. So norms,
    factors and orthogonalizations see the whole parameter, and are computed once. The bits are those of the same
    optimizer on an unsharded model with the same gradients. The state of a parameter is kept by its owner only. For
    `torch.optim.Muon`, updates travel in bf16 and the momentum stays in the shards, with the same bits.

    Parameter groups, schedulers, hooks, closures and a tensor as `lr` work as in PyTorch. Parameters without a gradient
    are not stepped. `repr` shows the owners. Every rank must build the optimizer.

    Args:
        params: parameters or parameter groups of a wrapped model: the result of its `parameters()` or
            `named_parameters()`. The module's own parameters stand for their shards.
        optimizer_class: a subclass of `torch.optim.Optimizer` that treats each parameter by itself.
        elementwise: options of `shardlite.AdamW` for the parameters that are not stepped whole. These parameters form
            parameter groups of their own, and are stepped in shards. `None` steps all parameters whole. A parameter
            group may have an entry `elementwise` with further options. Other options of a group apply to its whole
            parameters only.
        whole: `whole(name, shape) -> bool` selects the parameters that are stepped whole. The default selects matrices
            that are neither embeddings nor heads, by their names. Without `elementwise`, AdamW has its default options.
        **defaults: options of `optimizer_class`.

    Raises:
        LayoutError: the parameters are not those of a wrapped model, ranks pass different classes or parameters, or the
            class does not treat each parameter by itself. Also raised on ranks with valid arguments if another rank
            passes invalid arguments, except if none of its parameters is a shard or a group is empty.
        TypeError: `optimizer_class` is not an optimizer class, or does not take the options.
        ValueError: a parameter occurs twice, or a group is empty.

    Example:
        >>> optimizer = WholeParameters(
        ...     model.named_parameters(), torch.optim.Muon, lr=0.02, elementwise={"lr": 3e-4, "weight_decay": 0.1}
        ... )
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        *,
        elementwise: Mapping[str, Any] | None = None,
        whole: Rule | None = None,
        **defaults: Any,
    ) -> None:
        self.optimizer_class, self._rule = optimizer_class, whole
        given = {} if elementwise is None and whole is not None else elementwise
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"WholeParameters: elementwise must be a dict of options, got {type(given).__name__}")
        if whole is not None and not callable(whole):
            raise TypeError(f"WholeParameters: whole must be callable(name, shape) -> bool, got {whole!r}")
        self._moments = "fp32" if given is None else given.get("state", "fp32")
        self._elementwise = None if given is None else {key: given[key] for key in given if key != "state"}
        # A bound method would be a reference cycle, which keeps the model's memory until a garbage collection.
        self._make: Callable[[list[Group]], Optimizer] = lambda groups: optimizer_class(groups, **defaults)
        self._divides = optimizer_class is Muon and divides_muon()
        self._members: dict[Tensor, Member] = {}
        self._units: dict[tuple[Context, str], UnitStep] = {}
        self._ignored = Instance(self._make)
        self._stand_ins = Instance(self._make, has_states=False)
        self._adamw: AdamW | None = None
        self._queues: dict[Context, StreamQueue] = {}
        self._seen: list[Marks] = []
        """Marks of the options of each group after the latest step."""

        self._closure_is_checked = False
        self._class_defaults: dict[str, Any] = {}
        self._parts, named = self._prepare(params)  # one for each group
        super().__init__([part.group(named=named) for part in self._parts], {})
        self.defaults = self._class_defaults
        self._install(self._parts)

    # ---- construction -----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Collective. If needed, it is divided into whole and elementwise parameters.

        Args:
            param_group: `params`, and options. The constructor's values replace missing options.

        Raises:
            LayoutError, TypeError, ValueError: as for the constructor. Nothing was added.
        """
        if len(self.param_groups) < len(self._parts):  # the constructor adds a part that was checked
            super().add_param_group(param_group)
            return
        parts, _ = self._prepare([param_group])
        named = "param_names" in self.param_groups[0]
        defaults, self.defaults = self.defaults, {}
        try:
            for part in parts:
                super().add_param_group(part.group(named=named))
        finally:
            self.defaults = defaults
        self._parts += parts
        self._install(parts)

    def _prepare(self, params: Any) -> tuple[list[Part], bool]:
        """Divide parameter groups, and agree on them with all ranks. Return the parts, and whether names were given."""
        groups = groups_in(params)
        models = models_with(param for group in groups for _, param in group.params)
        if not models:
            raise LayoutError(
                "WholeParameters: none of the parameters is a shard of a wrapped model: wrap the model first, and pass "
                "parameters() or named_parameters() of the ShardLite model"
            )
        shards = {param: shard for model in models for param, shard in model.shards.by_param().items()}
        groups = [each._replace(params=[(name, shards.get(p, p)) for name, p in each.params]) for each in groups]
        parts, advice = list[Part](), list[str]()
        problem = problem_in(lambda: parts.extend(self._checked(groups, models, advice)))
        kind = getattr(self.optimizer_class, "__qualname__", "no class")
        facts = [f"{getattr(self.optimizer_class, '__module__', '')}.{kind}", *(part.fact for part in parts)]
        ranks, timeout, watch = models[0].ranks, models[0].context.timeout, models[0].context.reports.watching
        agree(ranks, facts, problem, what="WholeParameters", timeout=timeout, subject="optimizers", watch=watch)
        for each in advice:
            warnings.warn(f"WholeParameters: {each}", ShardWarning, stacklevel=3)
        return parts, any(group.named for group in groups)

    def _checked(self, groups: Sequence[Given], models: Sequence[OptimizerBridge], advice: list[str]) -> list[Part]:
        """Divide parameter groups, and fill in their options. Add to `advice` what the program should know.

        Raises:
            LayoutError, TypeError, ValueError: as for the constructor.
        """
        check_class(self.optimizer_class)
        check_elementwise(self._elementwise or {})
        members: dict[Tensor, Member] = {each.shard: each for model in models for each in members_of(model)}
        held = {param for group in getattr(self, "param_groups", ()) for param in group["params"]}
        parts = divided(groups, self._elementwise, self._rule, members, held)
        if whole := [part for part in parts if part.whole]:
            prototype = self._prototype(whole)
            self._class_defaults = prototype.defaults
            advice += judge_whole(models, prototype)
        else:
            advice.append(
                f"{self.optimizer_class.__name__} steps no parameter, because AdamW steps all: pass whole=..."
            )
        for part in parts:
            if not part.whole:
                part.fill(AdamW([{**part.options, "params": part.params}], state=self._moments).param_groups[0])
        return parts

    def _prototype(self, parts: Sequence[Part]) -> Optimizer:
        """Build the class on placeholders, and fill in its options."""
        try:
            prototype = self._make([{**part.options, "params": part.placeholders()} for part in parts])
        except ValueError as error:
            if self._elementwise is None and any(len(m.shape) != 2 for part in parts for m in part.members if m):
                hint = "to step some of the parameters by shardlite.AdamW, pass elementwise={...} with its options"
                raise ValueError(f"{error} (WholeParameters: {hint})") from error
            raise
        for part, group in zip(parts, prototype.param_groups, strict=True):
            part.fill(group)
        return prototype

    # ---- members and units ------------------------------------------------------------------------------------------

    def _install(self, parts: Sequence[Part]) -> None:
        """Choose the owners of new parameters, and add the parameters to the steps of their units."""
        first = len(self.param_groups) - len(parts)
        for index, part in enumerate(parts, first):
            if part.whole:
                self._add_members(index, [each for each in part.members if each is not None])
                pairs = zip(part.params, part.members, strict=True)
                ignored = {param: param for param, member in pairs if member is None}
                self._ignored.add(index, options_of(self.param_groups[index]), ignored)  # type: ignore[arg-type]
        if rest := self._elementwise_of(self.param_groups):
            self._adamw = AdamW(rest, state=self._moments)  # the groups stay the same objects
        self._seen += [marks_of(group) for group in self.param_groups[first:]]

    def _elementwise_of(self, groups: Sequence[Group]) -> list[Group]:
        return [group for group, part in zip(groups, self._parts, strict=True) if not part.whole]

    def _add_members(self, index: int, members: Sequence[Member]) -> None:
        """Add the members of one parameter group."""
        for context in dict.fromkeys(each.context for each in members):
            new = [each for each in members if each.context is context]
            assign(new, [each for each in self._members.values() if each.context is context])
        units: dict[tuple[Context, str], list[Member]] = {}
        for each in sorted(members, key=lambda member: member.place):
            each.group = index
            self._members[each.shard] = each
            units.setdefault((each.context, each.unit), []).append(each)
        options = options_of(self.param_groups[index])
        for unit, own in units.items():
            if unit not in self._units:
                self._units[unit] = MuonStep(proxy(self)) if self._divides else ClassStep(self._make)
            self._units[unit].add(index, options, own)
        if members and not self._divides and not any(each.is_mine for each in members):
            self._stand_ins.add(index, options, {members[0].shard: stand_in(members[0])})

    def _member_of(self, param: Tensor) -> Member | None:
        return None if self._divides else self._members.get(param)

    def __repr__(self) -> str:
        """Return the groups, the owners, and the parameters that are stepped elementwise."""
        lines = [super().__repr__(), f"{self.optimizer_class.__name__} steps whole parameters:"]
        for context in dict.fromkeys(each.context for each in self._members.values()):
            lines += describe([each for each in self._members.values() if each.context is context])
        if rest := [name for part in self._parts if not part.whole for name in part.names]:
            lines.append(f"AdamW steps the shards of {len(rest)} parameters: {', '.join(rest)}")
        return "\n".join(lines)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient. Collective.

        Args:
            closure: recomputes the loss and returns it. It is called once.

        Returns:
            The result of `closure`, or `None` without a closure.

        Raises:
            CommError: another rank failed or timed out.
        """
        loss = None
        if closure is not None:
            self._check_closure()
            with torch.enable_grad():
                loss = closure()
        if not any(param.grad is not None for group in self.param_groups for param in group["params"]):
            return loss  # the step is skipped, for example because a gradient is not finite
        self._check_groups()
        self._has_stepped = self._has_stepped or any(param.grad is not None for param in self._members)
        changes = [changed(group, seen) for group, seen in zip(self.param_groups, self._seen, strict=True)]
        instances = list(self._instances())
        for each in instances:
            each.take_options(self.param_groups, changes)
            each.take_states(self.state)
        self._step_all()
        for each in instances:
            each.give(self.param_groups)
            self.state.update(each.states())
        self._seen = [marks_of(group) for group in self.param_groups]
        return loss

    def _check_closure(self) -> None:
        """Raise unless the class uses a closure only by calling it once before the step."""
        if self._closure_is_checked:
            return
        instance = next((each.optimizer for each in self._instances() if each.optimizer is not None), None)
        if instance is not None and probe_closure(instance).same is False:
            raise LayoutError(
                f"WholeParameters: {self.optimizer_class.__name__} does not call the closure once, before its step, as "
                "WholeParameters does: use stage=0 and the class itself"
            )
        self._closure_is_checked = True

    def _check_groups(self) -> None:
        """Raise if the program has changed the parameters of a group by hand."""
        held = [[*map(id, group["params"])] for group in self.param_groups]
        if held != [[*map(id, part.params)] for part in self._parts]:
            raise LayoutError(
                "WholeParameters: the parameters in param_groups were changed by hand, but their owners are fixed: add "
                "parameters with add_param_group(), or build another WholeParameters"
            )

    def _step_all(self) -> None:
        others: list[Callable[[], None]] = [self._step_elementwise, self._ignored.step]
        others.append(partial(step_stand_ins, self._stand_ins))
        for context in dict.fromkeys(context for context, _ in self._units):
            steps = [step for (other, _), step in self._units.items() if other is context]
            if context not in self._queues:
                self._queues[context] = context.queue("whole parameters")
            run(context, steps, self._queues[context], others)
            others = []
        for each in others:
            each()

    def _linked_adamw(self) -> AdamW | None:
        if self._adamw is not None:
            self._adamw.state = self.state
        return self._adamw

    def _step_elementwise(self) -> None:
        if (adamw := self._linked_adamw()) is not None:
            # The hooks of all optimizers have been called already, for the step of `WholeParameters`.
            step_without_hooks(adamw)

    def _instances(self) -> Iterator[Instance]:
        yield from (step.instance for step in self._units.values() if isinstance(step, ClassStep))
        yield self._ignored
        yield self._stand_ins

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank. As in `AdamW.state_dict`, the moments of AdamW are in fp32.

        Returns:
            `state` and `param_groups`. The state of a whole parameter is on its owner only.
        """
        saved: dict[str, Any] = super().state_dict()
        rest = {index for group in self._elementwise_of(saved["param_groups"]) for index in group["params"]}
        decoded = {i: canonical(entry) for i, entry in saved["state"].items() if i in rest and "exp_avg" in entry}
        return {**saved, "state": saved["state"] | decoded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that `state_dict()` has returned on this rank.

        Args:
            state_dict: the state of an optimizer with the same class, parameter groups, ranks, stage and units. For
                other ranks, use `shardlite.load`.

        Raises:
            LayoutError: the state belongs to other parameters or owners. Raised on every rank; nothing was changed.
        """
        super().load_state_dict(unconverted(state_dict))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a loaded state."""
        self.param_groups = state["param_groups"]
        self.state.clear()
        if self._adamw is not None:  # this checks and completes the options
            self._adamw.__setstate__({"state": {}, "param_groups": self._elementwise_of(self.param_groups)})
        convert(state)
        self._load_entries((param, entry) for param, entry in state["state"].items() if isinstance(param, Tensor))

    def _load_entries(self, entries: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
        self._has_stepped = True
        states, adamw = dict[Tensor, dict[str, Any]](), self._linked_adamw()
        elementwise = {param for group in (adamw.param_groups if adamw else ()) for param in group["params"]}
        for param, entry in entries:
            if adamw is not None and param in elementwise:
                load_entries(adamw, [(param, entry)])
            elif param in self._members and self._divides:
                values = {name: v.to(param.device) if isinstance(v, Tensor) else v for name, v in entry.items()}
                self.state[param] = values
            else:
                states[param] = entry
        for each in self._instances():
            each.load(self.param_groups, states)
            self.state.update(each.states())
        self._seen = [marks_of(group) for group in self.param_groups]

    def __getstate__(self) -> NoReturn:
        """Raise `LayoutError`, because connections to other ranks cannot be copied."""
        raise LayoutError("WholeParameters cannot be copied or pickled: save its state_dict(), or use shardlite.save")
