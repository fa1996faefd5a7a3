"""Code that takes a shard for the full parameter gets one warning on every rank, or an error on all ranks."""

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from shardlite import AdamW, LayoutError, ShardLite, ShardWarning
from shardlite.engine.watch import EVERY, STEPS, SeenShard, _known
from tests.support.twins.sharded import same_states, slow, take_step

WIDTH = 40


def model_and_loss(group: Any, **options: Any) -> tuple[ShardLite, Callable[[], Tensor]]:
    """Of two ranks both have a part of each weight, and the first has nothing of the first bias."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))
    model = ShardLite(net, group=group, units=nn.Linear, **options)
    return model, lambda: model(torch.ones(2, WIDTH)).square().mean()


def heard(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(each.category is ShardWarning for each in caught), [str(each.message) for each in caught]
    return [str(each.message) for each in caught]


Params = list[nn.Parameter]


def norms_by_hand(params: Params) -> None:
    torch.stack([p.grad.detach().norm(2) for p in params]).norm(2)


def lamb(params: Params) -> None:
    """The trust ratio of each layer is that of norms of its weight and of its update."""
    for p in params:
        update = p.grad / (p.grad.abs() + 1e-6)
        trust = p.data.norm(2) / (update.norm(2) + 1e-6)
        p.data.add_(update * trust, alpha=-0.01)


def novograd(params: Params) -> None:
    for p in params:
        p.data.addcdiv_(p.grad, (torch.sum(torch.pow(p.grad, 2)) + 1e-8).sqrt(), value=-0.01)


def adaptive_clipping(params: Params) -> None:
    for p in matrices(params):
        bound = p.detach().norm(2, dim=tuple(range(1, p.ndim)), keepdim=True).clamp(min=1e-3)
        p.grad.mul_((bound / p.grad.norm(2, dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1))


def updates(params: Params) -> None:
    before = [p.detach().clone() for p in params]
    sum((p.detach() - was).norm() for p, was in zip(params, before, strict=True))


def matrices(params: Params) -> Params:
    return [p for p in params if p.ndim > 1]


cosine = functional.cosine_similarity
USES: dict[str, Callable[[Params], object]] = {
    "norms by hand": norms_by_hand,
    "norms of old": lambda params: sum(p.grad.data.norm(2).item() ** 2 for p in params),
    "norms of squares": lambda params: math.sqrt(sum(float(p.grad.float().pow(2).sum()) for p in params)),
    "norms at once": lambda params: torch._foreach_norm([p.grad for p in params]),
    "norms of linalg": lambda params: [torch.linalg.vector_norm(p.grad, 2) for p in params],
    "LAMB": lamb,
    "NovoGrad": novograd,
    "norms of copies": lambda params: [p.grad.clone().div(2).norm() for p in params],
    "norms of all": lambda params: torch.cat([p.grad.flatten() for p in params]).norm(),
    "noise": lambda params: [p.grad.add_(torch.randn_like(p) * 0.1) for p in params],
    "updates": updates,
    "adaptive clipping": adaptive_clipping,
    "centralisation": lambda params: [p.grad.add_(-p.grad.mean(dim=1, keepdim=True)) for p in matrices(params)],
    "AdamP": lambda params: [
        cosine(p.grad.view(p.size(0), -1), p.data.view(p.size(0), -1), dim=1) for p in matrices(params)
    ],
    "xavier": lambda params: [nn.init.xavier_uniform_(p) for p in matrices(params)],
    "statistics": lambda params: [(p.detach().mean().item(), p.detach().std().item()) for p in params if p.numel() > 1],
}


@pytest.mark.parametrize(("name", "stage"), [(name, 1 + place % 3) for place, name in enumerate(USES)])
@pytest.mark.sample(2)
def test_uses_of_parts_are_warned_of_once(group: Any, name: str, stage: int) -> None:
    model, loss = model_and_loss(group, stage=stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss().backward()
        model.clip_grad_norm_(1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    params = [p for p in model.parameters() if p.grad is not None]
    (message,) = heard(lambda: (USES[name](params), USES[name](params)))
    assert "weight'" in message or "bias'" in message
    for word in ("elements ", "clip_grad_norm_()", "gathered()", "WholeParameters"):
        assert word in message


@pytest.mark.stages(1, 3)
def test_penalties_in_the_loss_are_right(group: Any, stage: int) -> None:
    """A penalty in the loss is right: its gradient reaches the shards."""
    model, loss = model_and_loss(group, stage=stage)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optim.SGD(model.parameters(), lr=0.01)

    def penalised() -> None:
        squares = sum(p.pow(2).sum() + p.norm() ** 2 + p.norm(1) for p in model.parameters())
        apart = sum(((p - was) ** 2).sum() for p, was in zip(model.parameters(), before, strict=True))
        for p, was in zip(model.parameters(), before, strict=True):
            apart += functional.mse_loss(p, was, reduction="sum")
        (0.1 * squares + loss() + apart).div(2).backward()
        take_step(optimizer)  # afterwards the copies are not known

    assert heard(lambda: (penalised(), penalised())) == []


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda shard: shard.norm(),
    "norm of linalg": lambda shard: torch.linalg.vector_norm(shard, ord=2),
    "norm of norms": lambda shard: torch.stack([shard.norm(), shard.norm()]).norm(),
    "root of squares": lambda shard: shard.square().sum().sqrt(),
    "square of a sum": lambda shard: (0.1 * shard.sum()) ** 2,
    "exponential of a sum": lambda shard: shard.sum().exp(),
    "mean of squares": lambda shard: functional.mse_loss(shard, torch.zeros_like(shard)),
}


def test_other_penalties_are_warned_of(group: Any) -> None:
    """Their gradients would depend on the other ranks' parts."""
    model, loss = model_and_loss(group)
    shard = dict(model.named_parameters())["0.weight"]
    for name, penalty in PENALTIES.items():
        _known[shard].look.warned = False
        with pytest.warns(ShardWarning, match="of '0.weight' covers only this rank's part") as said:
            (loss() + 0.1 * penalty(shard)).backward()
        assert [each.filename for each in said] == [__file__], name


def test_norms_that_are_logged_with_gradients_enabled(group: Any) -> None:
    model, _ = model_and_loss(group)
    (message,) = heard(lambda: [p.norm().item() for p in model.parameters()])
    assert "covers only this rank's part" in message


@pytest.mark.parametrize(("group", "stage"), [(1, 3), (2, 0)], indirect=["group"])
def test_full_parameters_are_not(group: Any, stage: int) -> None:
    """Full parameters are not watched."""
    model, loss = model_and_loss(group, stage=stage)
    loss().backward()
    assert heard(lambda: [use(list(model.parameters())) for use in USES.values()]) == []


PARTIAL: dict[str, Callable[[Tensor], object]] = {
    **{name: lambda t, name=name: getattr(t, name)(0) for name in ("cumsum", "cumprod", "softmax", "logcumsumexp")},
    **{
        name: lambda t, name=name: getattr(t, name)() for name in ("sum", "median", "mode", "unique", "argsort", "prod")
    },
    **{name: lambda t, name=name: getattr(t, name)() for name in ("amax", "argmax", "aminmax", "count_nonzero", "max")},
    "logsumexp": lambda t: t.logsumexp(0),
    "cummax": lambda t: t.cummax(0),
    "sort": lambda t: t.sort(0),
    "topk": lambda t: t.flatten().topk(1),
    "kthvalue": lambda t: t.abs().flatten().kthvalue(1),
    "kthvalue of all": lambda t: torch.cat([t.abs().flatten(), t.flatten()]).kthvalue(1),
    "quantile": lambda t: t.exp().quantile(0.5),
    "histc": lambda t: t.histc(),
    "bincount": lambda t: t.flatten().abs().int().bincount(),
    "multinomial": lambda t: t.flatten().abs().add(1).multinomial(1),
    "renorm": lambda t: t.renorm(2, 0, 0.5),
    "svd": lambda t: torch.linalg.svd(t),
    "eigenvalues": lambda t: torch.linalg.eigvalsh(t @ t.T),
    "product": lambda t: t.T.mm(t),
    "product from the left": lambda t: torch.ones(1, t.shape[0]) @ t,
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(1),
    "differences": lambda t: t.diff(dim=0),
    "std_mean": lambda t: torch.std_mean(t),
    "normalize": lambda t: functional.normalize(t, dim=0),
    "layer_norm": lambda t: functional.layer_norm(t, t.shape[-1:]),
    "dropout": lambda t: functional.dropout(t),
    "einsum": lambda t: torch.einsum("ij,ij->", t, t),
    "rows": lambda t: t.split(1)[0].mean(),
    "lists": lambda t: torch._foreach_norm(torch._foreach_mul([t], 2)),
    "lists of maxima": lambda t: torch._foreach_max([t]),
    "elements of a mask": lambda t: t[t > -1].mean(),
    "mean of a condition": lambda t: (t > 0).float().mean(),
}


def forgotten(model: ShardLite) -> list[Tensor]:
    """Return the first shard, and its gradient. Its next use is warned of again."""
    shard = next(iter(model.parameters()))
    _known[shard].look.warned = False
    return [shard.detach(), shard.grad]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_any_function_that_is_not_elementwise_is_warned_of(group: Any) -> None:
    model, loss = model_and_loss(group)
    loss().backward()
    for name, use in PARTIAL.items():
        for index in (0, 1):
            said = heard(lambda use=use, index=index: use(forgotten(model)[index]))
            assert ["covers only this rank's part" in each for each in said] == [True], (name, index, said)


ELEMENTWISE: dict[str, Callable[[Tensor], object]] = {
    "moving average": lambda t: torch.zeros_like(t).lerp_(t, 0.1),
    "moving averages": lambda t: torch._foreach_lerp_([torch.zeros_like(t)], [t], 0.1),
    "clip by value": lambda t: t.clamp_(-1, 1),
    "clips by value": lambda t: torch._foreach_clamp_max_([t], 1.0),
    "sign": lambda t: t.add_(t.sign(), alpha=-0.1),
    "mask": lambda t: t.masked_fill_(t.isnan(), 0),
    "where": lambda t: torch.where(t > 0, t, 0),
    "larger": lambda t: torch.max(t, t.abs()),
    "conversion": lambda t: t.to(torch.float64).cpu().float().tolist(),
    "view": lambda t: t.view(-1).reshape(t.shape).T.contiguous(),
    "parts": lambda t: [each.mul_(2) for each in t.flatten().chunk(2)],
    "synonyms": lambda t: t.absolute().multiply(2).subtract_(1).divide(2).negative(),
    "activations": lambda t: functional.softsign(functional.gelu(t)),
    "conditions": lambda t: bool(t.isfinite().all()) and not torch.isnan(t).any() and torch.equal(t, t.clone()),
    "comparisons": lambda t: torch.allclose(t, t.clone()) and t.isclose(t).all().item(),
    "new": lambda t: (torch.empty_like(t).copy_(t), t.new_zeros(3).sum(), torch.ones_like(t).sum()),
    "facts": lambda t: (t.shape, t.numel(), t.stride(), t.requires_grad, t.device, len(t), repr(t), t.is_leaf),
}


def test_elementwise_functions_are_not_warned_of(group: Any) -> None:
    model, loss = model_and_loss(group)
    loss().backward()
    for name, use in ELEMENTWISE.items():
        for index in (0, 1):
            assert heard(lambda use=use, index=index: use(forgotten(model)[index])) == [], (name, index)


LONELY: dict[str, Callable[[Params], object]] = {
    "largest": lambda params: max(float(p.grad.abs().max()) for p in params),
    "infinite": lambda params: torch.stack([torch.norm(p.grad, math.inf) for p in params]).max(),
    "first element": lambda params: [p.grad.view(-1)[0].item() for p in params],
    "k-th value": lambda params: [p.grad.flatten().kthvalue(1) for p in params],
    "largest of all": lambda params: [p.grad.topk(1) for p in params],
    "quantile": lambda params: [p.grad.quantile(0.9) for p in params],
    "number": lambda params: [p.grad.view(-1)[:1].item() for p in params],
    "middle of the sorted": lambda params: [p.grad.flatten().sort().values[len(p) // 2] for p in params],
    "last of the sums": lambda params: [p.grad.abs().cumsum(0)[-1].item() for p in params],
    "largest index": lambda params: [int(p.grad.argsort(descending=True)[0]) for p in params],
}


def write_row(grad: Tensor) -> None:
    grad[0] = 0


def write_rows(grad: Tensor) -> None:
    grad[:2, :] = 0


PLACED: dict[str, Callable[[Tensor], object]] = {
    "row": write_row,
    "rows": write_rows,
    "index": lambda grad: grad.index_fill_(0, torch.tensor([0]), 0),
    "of data": lambda grad: write_row(grad.data),
    "put": lambda grad: grad.put_(torch.tensor([0]), torch.zeros(1)),
    "slice": lambda grad: grad.flatten()[:1].mul_(2),
    "slice in place": lambda grad: grad.flatten()[:1].__iadd__(1),
    "copy": lambda grad: grad[:1].copy_(torch.zeros(())),
}
VIEWS: dict[str, Callable[[Tensor], object]] = {
    "narrow": lambda grad: grad.narrow(0, 0, 1).zero_(),
    "unbind": lambda grad: grad.unbind()[0].zero_(),
    "rows in turn": lambda grad: [row.zero_() for row in grad],
}
"""Views of the first row. Of the bias, the first rank has no row."""


@pytest.mark.parametrize("name", [*PLACED, *VIEWS])
def test_writes_by_position_are_refused_on_every_rank(group: Any, name: str) -> None:
    """Both the shard's gradient, and that of the module's parameter. Masks, and whole slices, are elementwise."""
    model, loss = model_and_loss(group)
    loss().backward()
    bias = [model.module[0].bias] if name in PLACED else []
    for param in (dict(model.named_parameters())["0.weight"], model.module[0].weight, *bias):
        with pytest.raises(LayoutError, match=r"of the gradient of the shard of '0\..*': positions in a shard are not"):
            (PLACED | VIEWS)[name](param.grad)
        param.grad[param.grad.isnan()] = 0
        param.grad[:] = 0
        param.grad[...] = param.grad.clamp(-1, 1)
        assert not param.grad.any()


@pytest.mark.parametrize("stage", [3, *map(slow, (1, 2))])
@pytest.mark.parametrize("name", LONELY)
def test_what_one_rank_cannot_do_no_rank_does(group: Any, name: str, stage: int) -> None:
    """What would fail on the rank that has nothing of a parameter fails on all, in the same words."""
    model, loss = model_and_loss(group, stage=stage)
    loss().backward()
    with (
        warnings.catch_warnings(action="ignore", category=ShardWarning),
        pytest.raises(LayoutError, match=r"of the gradient of the shard of '0\.bias': ranks \[0\] have no element"),
    ):
        LONELY[name]([dict(model.named_parameters())["0.bias"]])


@pytest.mark.parametrize("stage", [3, 2])
def test_norms_that_are_logged_now_and_then(group: Any, stage: int) -> None:
    """Norms that a program logs every 50 steps are said to be those of parts, too; other steps have ordinary shards."""
    model, loss = model_and_loss(group, stage=stage)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    kinds = set()

    def train(steps: int, logs: bool) -> None:
        for step in range(steps):
            loss().backward()
            if type(next(model.parameters())) is SeenShard:
                kinds.add(step)
            if logs and step == steps - 1:
                norms_by_hand(list(model.parameters()))
            take_step(optimizer)

    assert heard(lambda: train(EVERY - 2, logs=False)) == []
    assert kinds == set(range(STEPS))
    (said,) = heard(lambda: train(2, logs=True))
    assert "covers only this rank's part" in said
    assert heard(lambda: train(2 * EVERY, logs=True)) == [], "it is said once"


OPTIMIZERS: tuple[Callable[[Any], optim.Optimizer], ...] = (
    lambda params: AdamW(params, lr=0.01),
    lambda params: optim.AdamW(params, lr=0.01, foreach=True),
    lambda params: optim.AdamW(params, lr=0.01, fused=True),
    lambda params: optim.Adam(params, lr=0.01, foreach=False, amsgrad=True),
    lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    lambda params: optim.RMSprop(params, lr=0.01, centered=True),
    lambda params: optim.Adagrad(params, lr=0.01),
    lambda params: optim.RAdam(params, lr=0.01),
    lambda params: optim.NAdam(params, lr=0.01),
    lambda params: optim.Rprop(params, lr=0.01),
    lambda params: optim.ASGD(params, lr=0.01),
    lambda params: optim.Adadelta(params),
    lambda params: optim.Adamax(params),
)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_a_step_are_watched(group: Any, when: str) -> None:
    """The check of the optimizer's class knows nothing of them."""
    model, loss = model_and_loss(group)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    register = getattr(optimizer, f"register_step_{when}_hook")
    register(lambda optimizer, *_: norms_by_hand(optimizer.param_groups[0]["params"]))
    loss().backward()
    (message,) = heard(lambda: (optimizer.step(), optimizer.step()))
    assert "covers only this rank's part" in message


def test_elementwise_optimizers_are_not_warned_of(group: Any) -> None:
    """Elementwise optimizers get no warning, and the watch is invisible to them."""
    for make in OPTIMIZERS:
        model, loss = model_and_loss(group)
        optimizer = make(model.parameters())
        for _ in range(STEPS + 1):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        for shard in model.parameters():
            assert "Seen" not in type(shard).__name__
            assert type(shard.grad) is Tensor
            assert all(type(value) is Tensor for value in optimizer.state[shard].values() if torch.is_tensor(value))


@torch.library.custom_op("shardlite_tests::step", mutates_args=("param",))
def step_of_a_library(param: Tensor, grad: Tensor, lr: float) -> None:
    if param.numel() == 0:
        raise RuntimeError("no elements")
    param -= lr * grad


def test_steps_by_operators_of_other_libraries_are_not_warned_of(group: Any) -> None:
    """They are called only for shards that have elements, as by bitsandbytes' optimizers in 32 bits."""
    model, loss = model_and_loss(group)

    def step() -> None:
        loss().backward()
        with torch.no_grad():
            for shard in model.parameters():
                if shard.numel():
                    step_of_a_library(shard, shard.grad, 0.1)

    assert heard(step) == []


def test_moving_averages_over_full_copies_are_refused(group: Any) -> None:
    """A moving average over a copy from before wrapping is refused in the words that every rank gets."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))
    average = copy.deepcopy(net)
    model = ShardLite(net, group=group)

    @torch.no_grad()
    def update(step: Callable[[Tensor, Tensor], object]) -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            step(a, p)

    for step in (lambda a, p: a.lerp_(p, 0.1), lambda a, p: a.mul_(0.9).add_(p.data, alpha=0.1)):
        with pytest.raises(LayoutError, match=r"of a full parameter and a shard of '\d\."):
            update(step)


def by_element(teacher: nn.Module, student: nn.Module) -> None:
    for average, weight in zip(teacher.parameters(), student.parameters(), strict=True):
        average.mul_(0.9).add_(weight.data, alpha=0.1)


def by_list(teacher: nn.Module, student: nn.Module) -> None:
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


@pytest.mark.stages(2, 3)
@pytest.mark.parametrize("average", [by_element, by_list])
@torch.no_grad()
def test_a_teacher_that_is_cut_differently_is_refused(group: Any, average: Any, stage: int) -> None:
    """The student has a frozen parameter, so equal models have other cuts if the teacher is frozen before wrapping."""
    torch.manual_seed(3)
    student = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))
    student[0].bias.requires_grad_(False)
    teachers = [copy.deepcopy(student).requires_grad_(False), copy.deepcopy(student)]
    plain = [copy.deepcopy(teachers[1]), copy.deepcopy(student)]
    student, cut_differently, teacher = (ShardLite(each, group=group, stage=stage) for each in (student, *teachers))
    if stage:
        with pytest.raises(LayoutError, match=r"which are cut at different .*freeze the teacher afterwards"):
            average(cut_differently, student)
    teacher.requires_grad_(False)
    for each in (*student.parameters(), *plain[1].parameters()):
        each.add_(1.0)
    average(teacher, student)
    average(*plain)
    same_states("the average", teacher.full_state_dict(), plain[0].state_dict())


def test_copies_of_gradients_are_ordinary_in_the_end(group: Any) -> None:
    """What an optimizer has kept of gradients is ordinary after the first steps, too."""
    model, loss = model_and_loss(group)
    kept = []
    for _ in range(STEPS):
        loss().backward()
        kept.append([shard.grad.clone() for shard in model.parameters()])
        optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    assert all(type(each) is Tensor for each in [each for step in kept for each in step])


def test_copies_and_files_are_ordinary(group: Any) -> None:
    """Copies and files have ordinary tensors in them."""
    model, loss = model_and_loss(group)
    loss().backward()
    shard = next(iter(model.parameters()))
    file = io.BytesIO()
    torch.save({"grad": shard.grad, "data": shard.data}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert [type(each) for each in loaded.values()] == [Tensor, Tensor]
    assert torch.equal(loaded["grad"], shard.grad)
    assert repr(shard.grad).startswith("tensor(")
    copied, gradient = copy.deepcopy(shard), copy.deepcopy(shard.grad)
    assert isinstance(copied, nn.Parameter)
    assert torch.equal(copied, shard)
    assert torch.equal(gradient, shard.grad)
    assert heard(lambda: (copied.norm(), gradient.norm())) == []


def test_a_compiled_optimizer(group: Any) -> None:
    model, loss = model_and_loss(group)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    warnings.filterwarnings("ignore", message="`torch.jit")  # the compiler's own
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(STEPS + 1):
        before = [p.detach().clone() for p in model.parameters()]
        loss().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        step()
        for p, was, grad in zip(model.parameters(), before, grads, strict=True):
            torch.testing.assert_close(p.detach(), was - 0.1 * grad)
        optimizer.zero_grad()


def test_gradients_by_shards_do_not_depend_on_ranks_without_elements(group: Any) -> None:
    model = ShardLite(nn.Linear(8, 2), group=group)  # rank 1 has the bias and nothing of the weight
    with pytest.raises(LayoutError, match=r"torch\.autograd\.grad with respect to a shard"):
        torch.autograd.grad(model(torch.ones(1, 8)).sum(), list(model.parameters()))
    model(torch.ones(1, 8)).sum().backward(inputs=list(model.parameters()))
    assert torch.equal(model.full_grad("bias"), torch.ones(2))
