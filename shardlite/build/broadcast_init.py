"""Broadcast of rank 0's initial values to all ranks, unit by unit. Knows nothing of how modules are initialised.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardlite.build.meta_init import Initializer, children_first
from shardlite.comm import Context, broadcast
from shardlite.params import ROOT, Flat, Unit, UnitPlan


def broadcast_init(
    plans: Sequence[UnitPlan], units: Sequence[Unit], module: nn.Module, context: Context, initializer: Initializer
) -> None:
    """Set all ranks' parameters to rank 0's values, in their new memory.

    A unit's values are sent as soon as all modules inside it are initialised, and then the former memory of its
    parameters is freed. So at most one unit, and the units around it, have whole values at a time.
    """
    by_name = {unit.name: unit for unit in units}
    ends = {plan.module: by_name[plan.name or ROOT] for plan in plans if plan.params}
    for each in children_first(module):
        initializer.initialise(each)
        if each in ends:
            broadcast_values(ends[each], context, lambda param: param.detach(), sent=Flat.unbind)
            initializer.sent(ends[each].params())
    for unit in units:
        if not unit.needs_gather:
            unit.bind()
    for buffer in module.buffers():
        if buffer.device != context.device:
            buffer.data = buffer.to(context.device)


def broadcast_values(
    unit: Unit,
    context: Context,
    value: Callable[[nn.Parameter], Tensor],
    *,
    sent: Callable[[Flat], None] = lambda _: None,
) -> None:
    """Set a unit's shards on every rank to `value(param)` of rank 0, for each parameter of the module.

    A second, whole copy of the weights exists only while a flat is sent. `sent` is called for each flat when `value` is
    no longer called for its parameters.
    """
    with torch.no_grad():
        for i, flat in enumerate(unit.flats):
            direct = flat.rank is None and flat.low is None
            whole = flat.local if direct else context.zeros(flat.layout.full_numel, flat.master)
            if not direct:
                context.ledger.track("staging", whole)
            if context.rank == 0:
                for param, view in flat.views(whole):
                    view.copy_(value(param))
            sent(flat)
            operation = context.operation(f"the values of unit {unit.name!r}, flat {i}", "values")
            for transport in context.transports:
                broadcast(whole, transport, operation=operation)
            if not direct:
                flat.keep(flat.own_part(whole))
            del whole  # before the next one is allocated


def broadcast_buffers(module: nn.Module, context: Context) -> None:
    """Copy rank 0's buffers (for example running statistics) to every rank.

    Equal buffers are not written: a mask may be an expanded view, which does not allow writes.
    """
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            flat = buffer.detach().reshape(-1).clone()
            operation = context.operation(f"buffer {name!r}", "buffers")
            for transport in context.transports:
                broadcast(flat, transport, operation=operation)
            if not torch.equal(flat.view(buffer.shape), buffer):
                buffer.copy_(flat.view(buffer.shape))
