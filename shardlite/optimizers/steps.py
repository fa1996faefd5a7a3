"""The steps of the parameters of one unit, by an instance of the program's class, or divided for `torch.optim.Muon`.

    ClassStep   weights and gradients go to the owner, the class steps there, and weights come back
    MuonStep    every rank updates the momentum of its shards; updates go to the owner in bf16, are orthogonalized
                there, and come back in bf16; every rank adds them to its shards

`torch.optim.Muon` rounds an update to bf16 before it computes with the whole matrix, and everything else that it does
is elementwise. So `MuonStep` sends 2 bytes per element in each direction instead of 8 and 4, keeps momentum in shards,
and computes the same bits.

Legend: `n` elements of a whole parameter, `k` elements that this rank keeps.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from shardlite.optimizers.groups import Group
from shardlite.optimizers.instance import Instance
from shardlite.optimizers.members import Member, placeholder


class ClassStep:
    """Steps the parameters of one unit with an instance of the program's class.

    The instance is built from placeholders. The values of a parameter are in memory during a step only.
    """

    def __init__(self, make: Callable[[list[Group]], Optimizer]) -> None:
        self.members: list[Member] = []
        self.instance = Instance(make)

    def add(self, index: int, options: Group, members: Sequence[Member]) -> None:
        """Add the members of a parameter group."""
        self.members += members
        self.instance.add(
            index, options, {each.shard: placeholder(each.shard, each) for each in members if each.is_mine}
        )

    def nbytes(self, member: Member) -> Sequence[tuple[torch.dtype, int]]:
        """Return dtype and bytes of the weight and of the gradient."""
        dtypes = member.flat.master, member.gradient().dtype
        return [(dtype, member.numel * dtype.itemsize) for dtype in dtypes]

    def begin(self, member: Member) -> Sequence[Tensor]:
        """Return this rank's pieces [k] of the weight and of the gradient."""
        return member.weight(), member.gradient()

    def run(self, wholes: Sequence[tuple[Member, Sequence[Tensor]]]) -> None:
        """Step the parameters that this rank owns, given weight [n] and gradient [n] of each. Overwrite the weights."""
        params = self.instance.params
        before = [(params[member.shard], params[member.shard].data) for member, _ in wholes]
        for member, (weight, grad) in wholes:
            param = params[member.shard]
            param.data = weight.view(tuple(member.shape))
            param.grad = grad.to(param.dtype).view(param.shape)
        try:
            self.instance.step()
            states = self.instance.states()
            with torch.no_grad():
                for member, (weight, grad) in wholes:
                    new = params[member.shard].detach()
                    if new.data_ptr() != weight.data_ptr() or not new.is_contiguous():  # the class replaced `.data`
                        weight.copy_(new.reshape(-1))
                    if member.moves and member.shard in states:
                        _own_memory(states[member.shard], grad)
        finally:
            for param, nothing in before:
                param.data, param.grad = nothing, None

    def end(self, member: Member, piece: Tensor) -> None:
        """Store the new weight [k]."""
        member.write(piece)


def _own_memory(state: dict[str, Any], grad: Tensor) -> None:
    """Copy state tensors that alias `grad` [n], because the next unit reuses its memory."""
    start, stop = grad.data_ptr(), grad.data_ptr() + grad.nbytes

    def lies_there(leaf: object) -> bool:
        return isinstance(leaf, Tensor) and start <= leaf.data_ptr() < stop

    if any(map(lies_there, tree_leaves(state))):
        state.update(tree_map(lambda leaf: leaf.clone() if lies_there(leaf) else leaf, dict(state)))


class MuonStep:
    """Steps the parameters of one unit as `torch.optim.Muon` does, with whole matrices in bf16 only."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Use the groups and the state of `optimizer`, which has the shards as parameters."""
        self.members: list[Member] = []
        self._optimizer = optimizer

    def add(self, index: int, options: Group, members: Sequence[Member]) -> None:
        """Add the members of a parameter group."""
        self.members += members

    def _group(self, member: Member) -> Group:
        return self._optimizer.param_groups[member.group]

    def nbytes(self, member: Member) -> Sequence[tuple[torch.dtype, int]]:
        """Return dtype and bytes of the update."""
        return [(torch.bfloat16, 2 * member.numel)]

    def begin(self, member: Member) -> Sequence[Tensor]:
        """Update the momentum of this rank's shard. Return the update [k]."""
        group, state = self._group(member), self._optimizer.state[member.shard]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(member.weight()).view(member.shard.shape)
        buffer, grad = state["momentum_buffer"].view(-1), member.gradient()
        return [updated(buffer, grad.to(buffer.dtype), group)]

    def run(self, wholes: Sequence[tuple[Member, Sequence[Tensor]]]) -> None:
        """Orthogonalize the updates [n] that this rank owns, in place."""
        for member, (update,) in wholes:
            own = update.view(tuple(member.shape))
            matrix = orthogonal(own, self._group(member))
            if matrix is not own:
                own.copy_(matrix)

    def end(self, member: Member, piece: Tensor) -> None:
        """Add the orthogonalized update [k] to this rank's shard."""
        weight = member.weight()
        apply(weight, piece, member.shape, self._group(member))
        member.write(weight)


UnitStep: TypeAlias = ClassStep | MuonStep


# ---- the parts of a step of `torch.optim.Muon` ----------------------------------------------------------------------

_muon: Any = import_module("torch.optim._muon")  # the attribute `torch.optim._muon` is a function in some versions


def updated(buffer: Tensor, grad: Tensor, group: Group) -> Tensor:
    """Update the momentum `buffer` [k] with a gradient [k]. Return the update [k] in bf16."""
    buffer.lerp_(grad, 1 - group["momentum"])
    update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
    return update.bfloat16()


def orthogonal(update: Tensor, group: Group) -> Tensor:
    """Return the orthogonalized `update` [a, b], both in bf16. The update is overwritten."""
    options = group["ns_coefficients"], group["ns_steps"], group["eps"]
    matrix: Tensor = _muon._zeropower_via_newtonschulz(update, *options)
    return matrix


def apply(weight: Tensor, update: Tensor, shape: Sequence[int], group: Group) -> None:
    """Add an orthogonalized update [k] to a part [k] of a weight of the given shape."""
    lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]  # as in PyTorch
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(update, alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], torch.Size(shape)))


def stand_in(member: Member) -> nn.Parameter:
    """Return a parameter like the member, with at most 160 elements per dimension."""
    shape = [min(length, 160) for length in member.shape]
    return nn.Parameter(torch.zeros(shape, dtype=member.flat.master, device=member.shard.device))


def step_stand_ins(instance: Instance) -> None:
    """Step small parameters, so that the options of their groups (such as step counts) follow those of other ranks."""
    generator = torch.Generator().manual_seed(0)
    for param in instance.params.values():
        param.data = torch.randn(param.shape, generator=generator, device="cpu").to(param)
        param.grad = torch.randn(param.shape, generator=generator, device="cpu").to(param)
    instance.step()


@cache
def divides_muon() -> bool:
    """Return whether the functions above reproduce the installed `torch.optim.Muon` to the bit."""
    generator = torch.Generator().manual_seed(0)
    tall, wide = (torch.randn(shape, generator=generator, device="cpu") for shape in ((9, 7), (64, 256)))
    for nesterov, adjust, start, lr in ((True, None, tall, 0.1), (False, "match_rms_adamw", wide, torch.tensor(0.02))):
        options: Any = {"lr": lr, "weight_decay": 0.3, "nesterov": nesterov, "adjust_lr_fn": adjust}
        param, ours = nn.Parameter(start.clone()), start.clone()
        optimizer, buffer = Muon([param], **options), torch.zeros_like(start)
        for _ in range(2):
            param.grad = torch.randn(start.shape, generator=generator, device="cpu")
            optimizer.step()  # type: ignore[no-untyped-call]
            try:
                group = optimizer.param_groups[0]
                update = orthogonal(updated(buffer, param.grad, group), group)
                apply(ours, update, start.shape, group)
            except (AttributeError, KeyError, TypeError):
                return False
        if not torch.equal(param.detach(), ours):
            return False
    return True
