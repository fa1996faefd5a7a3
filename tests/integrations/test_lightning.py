"""Lightning's `Trainer` and `Fabric` with ShardLite: equal to the bit to the same program with DDP."""

import copy
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardlite import AdamW, LayoutError, Precision, ShardLite, WholeParameters
from tests.support.lightning_runs import (
    TIMEOUT,
    Maker,
    assert_same,
    layers,
    loader,
    maker,
    on_both,
    session,
    whole,
)
from tests.support.models.kept import CastsRouter, Mixture, Router
from tests.support.ranks.scripts import run_process

pytest.importorskip("lightning", "2.6", reason="needs lightning")

from shardlite.integrations.lightning import ShardLiteFabricStrategy, ShardLiteStrategy, _refuse_precision


def module(base: Any = None, **attributes: Any) -> Any:
    """Return a `LightningModule`. `base` is a mixin; `attributes` are set on the module."""
    from lightning.pytorch import LightningModule

    class Net(LightningModule):  # type: ignore[misc]
        optimizer = staticmethod(lambda params: torch.optim.AdamW(params, lr=1e-2))

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = layers()
            self.seen: list[Any] = []

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]).float(), batch[1])

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.seen.append(loss.detach().clone())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.loss(batch), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return self.optimizer(self.parameters())

    net = Net() if base is None else type(base.__name__, (base, Net), {})()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


def trained(trainer: Any, net: Any, **options: Any) -> list[Any]:
    trainer.fit(net, loader(), **options)
    return [net.seen, dict(trainer.callback_metrics), whole(trainer)]


# ---- cases ----------------------------------------------------------------------------------------------------------


def plain(make: Maker) -> Any:
    return trained(make(), module())


def evaluation(make: Maker) -> Any:
    trainer, net = make(), module()
    trainer.fit(net, loader(), loader(22, 1))
    results = [dict(trainer.callback_metrics), trainer.test(net, loader(10, 2), verbose=False)]
    return [*results, trainer.validate(net, loader(10, 2), verbose=False), trainer.predict(net, loader(10, 2))]


def evaluation_first(make: Maker) -> Any:
    trainer, net = make(), module()
    first = trainer.validate(net, loader(10, 2), verbose=False)
    return [first, trainer.predict(net, loader(10, 2)), trained(trainer, net)]


def accumulation(make: Maker) -> Any:
    return trained(make(accumulate_grad_batches=3), module())


def clipping_by_value(make: Maker) -> Any:
    return trained(make(accumulate_grad_batches=2, gradient_clip_val=0.01, gradient_clip_algorithm="value"), module())


def clipping_by_norm(make: Maker) -> Any:
    return trained(make(accumulate_grad_batches=2, gradient_clip_val=0.1), module(optimizer=_sgd))


def _sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def scheduled_accumulation(make: Maker) -> Any:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return trained(make(callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})]), module())


class Scheduled:
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)  # type: ignore[attr-defined]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}  # type: ignore[attr-defined]


def schedules(make: Maker) -> Any:
    return [trained(make(), module(Scheduled, interval=each)) for each in ("step", "epoch")]


class Gan:
    """Two networks, each with its optimizer, toggled in turn. Gradients are dropped before a step, or after it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.critic = getattr(self, "critic", None)
        return [_sgd(self.net.parameters()), torch.optim.Adam(self.judge.parameters(), lr=1e-2)]  # type: ignore[attr-defined]

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)  # type: ignore[attr-defined]
            loss = F.cross_entropy(self.judge(self.net(batch[0])), batch[1])  # type: ignore[attr-defined]
            self.manual_backward(loss)  # type: ignore[attr-defined]
            if self.clip:  # type: ignore[attr-defined]
                self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)  # type: ignore[attr-defined]
            self.seen.append(loss.detach().clone())  # type: ignore[attr-defined]


def gan(make: Maker) -> Any:
    return [trained(make(), module(Gan, judge=nn.Linear(5, 5), clip=clip)) for clip in (False, True)]


class Manual:
    """Accumulates by hand, with two backwards in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()  # type: ignore[attr-defined]
        for part in (slice(0, 2), slice(2, 4)):
            loss = self.loss((batch[0][part], batch[1][part]))  # type: ignore[attr-defined]
            self.manual_backward(loss)  # type: ignore[attr-defined]
            self.seen.append(loss.detach().clone())  # type: ignore[attr-defined]
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


def manual(make: Maker) -> Any:
    return trained(make(), module(Manual, optimizer=_sgd))


class Toggled:
    """Accumulates with `toggle_model(sync_grad=...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()  # type: ignore[attr-defined]
        with optimizer.toggle_model(sync_grad=bool(index % 2)):
            self.manual_backward(self.loss(batch))  # type: ignore[attr-defined]
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()


def toggled(make: Maker) -> Any:
    return trained(make(), module(Toggled))


def twice(make: Maker) -> Any:
    trainer, net = make(), module()
    first = trained(trainer, net)
    trainer.fit_loop.max_epochs = 4
    return [first, trained(trainer, net)]


def second_trainer(make: Maker) -> Any:
    net = module()
    return [trained(make(), net), trained(make(), net), trained(make(precision="bf16-mixed"), net)]


def mixed(make: Maker) -> Any:
    return trained(make(precision="bf16-mixed"), module())


def kept(make: Maker) -> Any:
    trainer = make(precision="bf16-mixed")
    return trained(trainer, module(net=mixture(trainer)))


def mixture(trainer: Any) -> nn.Module:
    """Return a model whose router is kept by `Precision` or, with DDP, leaves autocast by itself."""
    return Mixture(7, 5, CastsRouter if type(trainer.strategy).__name__.startswith("DDP") else Router)


def true_bf16(make: Maker) -> Any:
    return trained(make(precision="bf16-true"), module())


def true_64(make: Maker) -> Any:
    return trained(make(precision="64-true"), module())


def scaled(make: Maker) -> Any:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)  # the first steps overflow
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return [trained(make(plugins=[plugin]), module()), scaler.get_scale()]


def averaged_swa(make: Maker) -> Any:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return trained(make(max_epochs=4, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)]), module())


def averaged_batch_norm(make: Maker) -> Any:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    net = module(net=nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)))
    return trained(make(max_epochs=4, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)]), net)


def averaged_ema(make: Maker) -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    trainer, net = make(callbacks=[EMAWeightAveraging(decay=0.9)]), module()
    trainer.fit(net, loader(), loader(22, 1))
    return [net.seen, dict(trainer.callback_metrics), whole(trainer)]


def checkpoints(make: Maker) -> Any:
    """Save at each epoch, test the best, go on, and read the file in a plain module."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    torch.manual_seed(1)
    keep = ModelCheckpoint(monitor="validation", save_last=True, save_top_k=2, filename="{epoch}")
    more = {"callbacks": [keep, EarlyStopping("validation", patience=9)], "enable_checkpointing": True}
    trainer, net = make(**more), module(Scheduled, interval="step")
    trainer.fit(net, loader(), loader(22, 1))
    last = keep.last_model_path
    results = [trainer.test(net, loader(10, 2), ckpt_path="best", verbose=False), whole(trainer)]
    saved = torch.load(last, weights_only=True)
    results += [saved["state_dict"], saved["optimizer_states"], saved["lr_schedulers"]]
    again, other = make(max_epochs=4), module(Scheduled, interval="step")
    again.fit(other, loader(), loader(22, 1), ckpt_path=last)
    results += [other.seen, whole(again)]
    again.save_checkpoint("weights.ckpt", weights_only=True)
    lone = torch.load("weights.ckpt", weights_only=True)
    assert "optimizer_states" not in lone
    fresh = module()
    fresh.load_state_dict(lone["state_dict"])
    return [*results, fresh.state_dict()]


def averages_go_on(make: Maker) -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    trainer, net = make(callbacks=[EMAWeightAveraging(decay=0.9)]), module()

    class Save(torch.nn.Module):
        pass

    trainer.fit(net, loader())
    trainer.save_checkpoint("average.ckpt")
    saved = torch.load("average.ckpt", weights_only=True)
    again, other = make(max_epochs=3, callbacks=[EMAWeightAveraging(decay=0.9)]), module()
    again.fit(other, loader(), ckpt_path="average.ckpt")
    return [saved["state_dict"], saved["current_model_state"], other.seen, whole(again)]


def swa_goes_on(make: Maker) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

    def callbacks() -> list[Any]:
        return [StochasticWeightAveraging(1e-2, swa_epoch_start=1), ModelCheckpoint(save_last=True, filename="{epoch}")]

    first = make(max_epochs=4, callbacks=callbacks(), enable_checkpointing=True)
    net = module()
    first.fit(net, loader())
    path = sorted(Path(first.checkpoint_callback.dirpath).glob("epoch*.ckpt"))[0]
    again, other = make(max_epochs=6, callbacks=callbacks(), enable_checkpointing=True), module()
    again.fit(other, loader(), ckpt_path=path)
    return [whole(first), other.seen, whole(again)]


def norms(make: Maker) -> Any:
    from lightning.pytorch.utilities import grad_norm

    class Norms:
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found = {**grad_norm(self.net[0], 2), **{f"all {k}": v for k, v in grad_norm(self, 2).items()}}  # type: ignore[attr-defined]
            self.log_dict(found)  # type: ignore[attr-defined]
            self.seen.append(found)  # type: ignore[attr-defined]

    return trained(make(), module(Norms))


def finetuning(make: Maker) -> Any:
    from lightning.pytorch.callbacks import BackboneFinetuning

    class AfterWrapping(BackboneFinetuning):
        """DDP does not average gradients of parameters that were frozen when it was built, so freeze them later."""

        def freeze_before_training(self, pl_module: Any) -> None:
            if not type(pl_module.trainer.strategy).__name__.startswith("DDP"):
                super().freeze_before_training(pl_module)

    class Frozen:
        def configure_optimizers(self) -> Any:
            self.backbone.requires_grad_(False)  # type: ignore[attr-defined]
            params = [param for param in self.parameters() if param.requires_grad]  # type: ignore[attr-defined]
            optimizer = torch.optim.AdamW(params, lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def run(epochs: int, path: str | None = None) -> tuple[Any, Any]:
        callback = AfterWrapping(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1, verbose=False)
        net = module(Frozen, backbone=nn.Linear(7, 7), head=layers())
        del net.net
        net.net = nn.Sequential(net.backbone, net.head)
        trainer = make(max_epochs=epochs, callbacks=[callback])
        return trainer, trained(trainer, net, ckpt_path=path)

    trainer, first = run(3)
    trainer.save_checkpoint("tuned.ckpt")
    return [first, run(4, "tuned.ckpt")[1]]


def averages_best(make: Maker) -> Any:
    """Test the best weights of a run with averages."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    keep = ModelCheckpoint(monitor="validation", filename="{epoch}")
    trainer = make(callbacks=[EMAWeightAveraging(decay=0.9), keep], enable_checkpointing=True)
    net = module()
    trainer.fit(net, loader(), loader(22, 1))
    return [trainer.test(net, loader(10, 2), ckpt_path="best", verbose=False), whole(trainer)]


def late_layers(make: Maker) -> Any:
    """Create the layers in `configure_model`, on the meta device where nothing has values yet."""

    class Late:
        def configure_model(self) -> None:
            if getattr(self, "net", None) is None:
                torch.manual_seed(3)
                self.net = layers()

    net = module(Late)
    net.net = None
    return trained(make(), net)


def finds_rates(make: Maker) -> Any:
    from lightning.pytorch.tuner import Tuner

    trainer, net = make(max_epochs=1), module(learning_rate=1e-3)
    net.optimizer = lambda params: torch.optim.SGD(params, lr=net.learning_rate)
    found = Tuner(trainer).lr_find(net, loader(), num_training=12, early_stop_threshold=None)
    return [torch.tensor(found.results["loss"]), net.learning_rate, trained(trainer, net)]


def overfits(make: Maker) -> Any:
    return trained(make(overfit_batches=2), module())


def frozen(make: Maker) -> Any:
    net = module()
    net.net[0].requires_grad_(False)
    return trained(make(), net)


def counts(make: Maker) -> Any:
    from lightning.pytorch.utilities.model_summary import ModelSummary

    net = module()
    trainer = make(enable_model_summary=True)
    trainer.fit(net, loader())
    summary = ModelSummary(net, max_depth=-1)
    return [summary.total_parameters, summary.trainable_parameters, summary.model_size, summary.param_nums]


def rank_calls(make: Maker) -> Any:
    class Calls:
        def on_train_start(self) -> None:
            strategy, rank = self.trainer.strategy, self.global_rank  # type: ignore[attr-defined]
            strategy.barrier()
            self.seen.append(strategy.broadcast({"rank": rank}, 1))  # type: ignore[attr-defined]
            self.seen.append(strategy.reduce(torch.tensor(float(rank)), reduce_op="sum"))  # type: ignore[attr-defined]
            self.seen.append(self.all_gather(torch.tensor(rank)))  # type: ignore[attr-defined]

    return trained(make(), module(Calls))


def early_optimizer(make: Maker) -> Any:
    """An optimizer that the module has built in its constructor."""
    net = module()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net.optimizer = lambda params: optimizer
    return [trained(make(), net), trained(make(), net)]


# ---- cases of Fabric ------------------------------------------------------------------------------------------------


def fabric_weights(model: Any) -> dict[str, Tensor]:
    forward = model._forward_module
    state = forward.full_state_dict() if isinstance(forward, ShardLite) else forward.module.state_dict()
    return {name: value.clone() for name, value in state.items()}


def fabric_train(fabric: Any, model: Any, optimizer: Any, *, clip: dict[str, float] = {}, every: int = 2) -> Any:  # noqa: B006
    losses = []
    for index, (x, y) in enumerate(fabric.setup_dataloaders(loader())):
        last = index % every == every - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(x).float(), y)
            fabric.backward(loss)
        losses.append(loss.detach())
        if last:
            if clip:
                losses.append(fabric.clip_gradients(model, optimizer, **clip))
            optimizer.step()
            optimizer.zero_grad()
    return [losses, fabric_weights(model), fabric.all_gather(losses[0]), fabric.all_reduce(losses[0])]


def fabric_model() -> nn.Module:
    torch.manual_seed(3)
    return layers()


def fabric_plain(make: Maker) -> Any:
    fabric, net = make(), fabric_model()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return fabric_train(fabric, model, optimizer, clip={"clip_val": 0.01})


def fabric_one_by_one(make: Maker) -> Any:
    fabric, net = make(), fabric_model()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fabric_train(fabric, model, optimizer)


def fabric_early_optimizer(make: Maker) -> Any:
    fabric, net = make(), fabric_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = fabric.setup_module(net), optimizer
    return fabric_train(fabric, model, fabric.setup_optimizers(optimizer))


def fabric_mixed(make: Maker) -> Any:
    fabric, net = make(precision="bf16-mixed"), fabric_model()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return fabric_train(fabric, model, optimizer)


def fabric_kept(make: Maker) -> Any:
    fabric = make(precision="bf16-mixed")
    model, optimizer = fabric.setup(net := mixture(fabric), torch.optim.AdamW(net.parameters(), lr=1e-2))
    return fabric_train(fabric, model, optimizer)


def fabric_scaled(make: Maker) -> Any:
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    fabric, net = make(plugins=[MixedPrecision("16-mixed", "cpu", scaler)]), fabric_model()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return [fabric_train(fabric, model, optimizer, every=1), scaler.get_scale()]


def fabric_norm(make: Maker) -> Any:
    fabric, net = make(), fabric_model()
    model, optimizer = fabric.setup(net, _sgd(net.parameters()))
    return fabric_train(fabric, model, optimizer, clip={"max_norm": 0.1})


def fabric_checkpoints(make: Maker) -> Any:
    """Save models, an optimizer and numbers; load them into others; filter; load single objects."""
    fabric, net = make(), fabric_model()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    first = fabric_train(fabric, model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 7, "more": 1}
    fabric.save("run.ckpt", state)
    fabric.save("part.ckpt", state, filter={"model": lambda name, _: name.startswith("0.")})
    fabric.save("model.ckpt", {"model": model})
    other = layers()
    again, adam = fabric.setup(other, torch.optim.AdamW(other.parameters(), lr=1.0))
    new = {"model": again, "optimizer": adam, "step": 0}
    rest = fabric.load("run.ckpt", new, strict=False)
    second = fabric_train(fabric, again, adam)
    saved = torch.load("run.ckpt", weights_only=True)
    torch.save(saved["model"], f"raw{fabric.global_rank}.pt")
    third = fabric.setup_module(layers())
    fabric.load_raw(f"raw{fabric.global_rank}.pt", third)
    part = torch.load("part.ckpt", weights_only=True)
    return [first, new["step"], rest, second, saved, part, fabric_weights(third)]


def fabric_methods(make: Maker) -> Any:
    """Call another method of the module than `forward`, and several models."""
    fabric, net, judge = make(), fabric_model(), nn.Linear(5, 3)
    net.twice = types.MethodType(lambda self, x: 2 * self(x), net)
    model, first = fabric.setup(net, _sgd(net.parameters()))
    judge, second = fabric.setup(judge, _sgd(judge.parameters()))
    model.mark_forward_method("twice")
    losses = []
    for x, _ in fabric.setup_dataloaders(loader()):
        loss = judge(model.twice(x)).square().mean()
        fabric.backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [losses, fabric_weights(model), fabric_weights(judge)]


# ---- tests ----------------------------------------------------------------------------------------------------------

EXACT = [
    *(plain, evaluation, evaluation_first, accumulation, clipping_by_value, scheduled_accumulation, schedules, gan),
    *(toggled, twice, second_trainer, mixed, true_64, scaled, averaged_swa, averaged_batch_norm),
    *(
        averaged_ema,
        averages_best,
        checkpoints,
        averages_go_on,
        swa_goes_on,
        norms,
        finetuning,
        late_layers,
        finds_rates,
        overfits,
    ),
    *(frozen, counts, rank_calls, early_optimizer),
]


NEAR = {
    # DDP averages earlier gradients again with each later one: the same numbers, rounded in another place.
    manual: {"rtol": 1e-5, "atol": 1e-6},
    # The norm is added in another order.
    clipping_by_norm: {"rtol": 1e-5, "atol": 1e-6},
    # ShardLite steps weights in fp32, and DDP in bf16, with an error of 2**-9 in each of 12 steps.
    true_bf16: {"rtol": 12 * 2**-9, "atol": 12 * 2**-9, "check_dtype": False},
}

FABRIC = [
    *(fabric_plain, fabric_one_by_one, fabric_early_optimizer, fabric_mixed, fabric_scaled, fabric_checkpoints),
    fabric_methods,
]
NEAR_FABRIC = {fabric_norm: {"rtol": 1e-5, "atol": 1e-6}}


def same_as_ddp(
    group: Any, folder: Path, stage: int, case: Any, bound: dict[str, float], fabric: bool, **options: Any
) -> None:
    """Body of a rank: run a case with both and compare what it returns."""
    plainly, sharded = on_both(group, folder, stage, case, fabric=fabric, **options)
    assert_same(plainly, sharded, **bound)


def cases(*groups: Any, short: Any) -> Any:
    found = [(stage, case, dict(group)[case]) for stage in (3, 2) for group in groups for case in group]
    return pytest.mark.parametrize(
        ("stage", "case", "bound"),
        [
            pytest.param(
                *each, id=f"{each[1].__name__}-{each[0]}", marks=[] if each[:2] == (3, short) else pytest.mark.slow
            )
            for each in found
        ],
    )


@cases({case: {} for case in EXACT}, NEAR, short=plain)
def test_a_program_is_as_with_ddp(cluster, tmp_path, stage, case, bound):
    cluster.run(same_as_ddp, 2, tmp_path, stage, case, bound, False)


@cases({case: {} for case in FABRIC}, NEAR_FABRIC, short=fabric_checkpoints)
def test_fabric_is_as_with_ddp(cluster, tmp_path, stage, case, bound):
    cluster.run(same_as_ddp, 2, tmp_path, stage, case, bound, True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [gan, averaged_ema, norms, finetuning, evaluation])
def test_a_program_is_nearly_as_with_ddp_on_three_ranks(cluster, tmp_path, case):
    # Sums of three gradients are added in another order, and Adam divides tiny gradients by their own size.
    cluster.run(same_as_ddp, 3, tmp_path, 3, case, {"rtol": 1e-3, "atol": 1e-3}, False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("case", [accumulation, gan, checkpoints, averaged_ema, norms, finetuning])
def test_other_stages_are_as_ddp(cluster, tmp_path, stage, case):
    cluster.run(same_as_ddp, 2, tmp_path, stage, case, {}, False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", [kept, fabric_kept])
def test_kept_modules_are_as_with_ddp_and_the_same_casts(cluster, tmp_path, stage, case):
    precision = Precision(compute=torch.bfloat16, keep=Router)
    cluster.run(same_as_ddp, 2, tmp_path, stage, case, {}, case is fabric_kept, precision=precision)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def sharded(group: Any, folder: Path, stage: int = 3) -> Maker:
    return maker(folder, group.size(), lambda: ShardLiteStrategy(stage=stage, timeout=TIMEOUT))


def save_run(group: Any, folder: Path, stage: int | None) -> None:
    with session(group, folder):
        torch.manual_seed(5)
        make = maker(folder, group.size(), "ddp") if stage is None else sharded(group, folder, stage)
        trainer = make()
        trainer.fit(module(Scheduled, interval="step"), loader())
        trainer.save_checkpoint(folder / "run.ckpt")


def resume(group: Any, folder: Path, epochs: int, stage: int | None) -> Any:
    """Go on from `run.ckpt`; with two epochs, load and save only."""
    with session(group, folder):
        make = maker(folder, group.size(), "ddp") if stage is None else sharded(group, folder, stage)
        trainer, net = make(max_epochs=epochs), module(Scheduled, interval="step")
        trainer.fit(net, loader(), ckpt_path=folder / "run.ckpt")
        trainer.save_checkpoint(folder / f"after{stage}.ckpt")
        return [net.seen, whole(trainer)]


def resume_from_meta(group: Any, folder: Path) -> Any:
    """Create the layers without memory. Their weights come from the file, after wrapping."""

    class Late(Scheduled):
        def configure_model(self) -> None:
            if getattr(self, "net", None) is None:
                with torch.device("meta"):
                    self.net = layers()

    with session(group, folder):
        trainer, net = sharded(group, folder)(max_epochs=3), module(Late, interval="step")
        net.net = None
        trainer.fit(net, loader(), ckpt_path=folder / "run.ckpt")
        return [net.seen, whole(trainer)]


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_strategy_stage_and_number_of_ranks(cluster, tmp_path):
    for saver in (None, 3):
        folder = tmp_path / f"saved{saver}"
        folder.mkdir()
        cluster.run(save_run, 2, folder, saver)
        saved = torch.load(folder / "run.ckpt", weights_only=True)
        expected = cluster.run(resume, 2, folder, 3, None)
        for stage in (3, 2):
            assert_same(expected, cluster.run(resume, 2, folder, 3, stage))
        assert_same(expected, cluster.run(resume_from_meta, 2, folder))
        cluster.run(resume, 3, folder, 2, 3)
        again = torch.load(folder / "after3.ckpt", weights_only=True)
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert_same(saved[key], again[key])


def replicas(group: Any, folder: Path) -> None:
    """Train four ranks as two replicas of two shards, and save and resume."""
    results = []
    with session(group, folder):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for strategy in ("ddp", lambda: ShardLiteStrategy(group=mesh, timeout=TIMEOUT)):
            make = maker(folder, 4, strategy)
            first, second = make(accumulate_grad_batches=2), make(max_epochs=3)
            net, other = module(optimizer=_sgd), module(optimizer=_sgd)
            first.fit(net, loader())
            first.save_checkpoint(folder / "replicas.ckpt")
            second.fit(other, loader(), ckpt_path=folder / "replicas.ckpt")
            results.append([net.seen, other.seen, whole(second)])
    assert_same(*results, rtol=1e-5, atol=1e-6)  # four gradients are added in another order


@pytest.mark.slow
def test_hybrid_sharding_saves_and_resumes(cluster, tmp_path):
    cluster.run(replicas, 4, tmp_path)


class Chosen:
    """Saves some of its weights."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        return {name: value for name, value in state.items() if name.startswith("net.0")}


class Counted:
    """Saves something that is neither a parameter nor a buffer."""

    def get_extra_state(self) -> Any:
        return {"steps": len(self.seen)}  # type: ignore[attr-defined]

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


def own_state(group: Any, folder: Path) -> None:
    with session(group, folder):
        trainer, net = sharded(group, folder)(), module(Chosen)
        trainer.fit(net, loader())
        trainer.save_checkpoint("own.ckpt")
        saved = torch.load("own.ckpt", weights_only=True)["state_dict"]
        weights = whole(trainer)
        assert_same({name: weights[name] for name in ("net.0.weight", "net.0.bias")}, saved)
        net = module(Counted)
        trainer = sharded(group, folder)()
        trainer.fit(net, loader())
        trainer.save_checkpoint("counted.ckpt")
        saved = torch.load("counted.ckpt", weights_only=True)["state_dict"]
        assert_same({**whole(trainer), "_extra_state": {"steps": 12}}, {**saved})


@pytest.mark.slow
def test_a_module_chooses_what_it_saves(cluster, tmp_path):
    cluster.run(own_state, 2, tmp_path)


@pytest.mark.slow
def test_a_plain_process_reads_a_checkpoint(cluster, tmp_path):
    from lightning.pytorch.demos.boring_classes import BoringModel

    weights = cluster.run(save_boring, 2, tmp_path)[0]
    loaded = BoringModel.load_from_checkpoint(tmp_path / "boring.ckpt", weights_only=True)
    assert_same(weights, dict(loaded.state_dict()))


def save_boring(group: Any, folder: Path) -> Any:
    from lightning.pytorch.demos.boring_classes import BoringModel

    with session(group, folder):
        trainer = sharded(group, folder)(max_epochs=1)
        trainer.fit(BoringModel())
        trainer.save_checkpoint(folder / "boring.ckpt")
        return whole(trainer)


# ---- optimizers of ShardLite, modules between trainers, errors ------------------------------------------------------


def own_optimizers(group: Any, folder: Path) -> None:
    """ShardLite's optimizers are built from the module's own parameters, in the first fit and in a second one."""
    with session(group, folder):
        make = sharded(group, folder)
        made: list[Any] = []

        def remember(optimizer: Any) -> Any:
            made.append(optimizer)
            return optimizer

        def in_backward(params: Any) -> Any:
            return AdamW([{"params": params, "lr": 1e-2}], in_backward=True)

        for build in (
            lambda params: AdamW(params, lr=1e-2),
            in_backward,
            lambda params: WholeParameters(params, torch.optim.Adafactor, lr=1e-2),
        ):
            net = module(optimizer=lambda params, build=build: remember(build(params)))
            for _ in range(1 if build is in_backward else 2):  # one such optimizer may exist for a model
                trainer = make()
                before = trained(trainer, net)[-1]
            trainer.save_checkpoint(folder / "own.ckpt")
            other = make(max_epochs=3)
            fresh = module(optimizer=build)
            other.fit(fresh, loader(), ckpt_path=folder / "own.ckpt")
            if build is not in_backward:
                trainer.fit_loop.max_epochs = 3
                trainer.fit(net, loader(), ckpt_path=folder / "own.ckpt")
                assert_same(whole(trainer), whole(other))
            assert any(not torch.equal(value, before[name]) for name, value in whole(other).items())
        assert len(made) == 7


@pytest.mark.slow
def test_optimizers_of_shardlite(cluster, tmp_path):
    cluster.run(own_optimizers, 2, tmp_path)


def between_trainers(group: Any, folder: Path) -> None:
    with session(group, folder):
        make, net = sharded(group, folder), module()
        trainer = make()
        trainer.fit(net, loader())
        model = trainer.strategy.model
        assert make().validate(net, loader(10, 2), verbose=False)
        second = make()
        second.fit(net, loader())
        assert second.strategy.model is model
        other = sharded(group, folder, 2)()
        other.fit(net, loader())
        assert other.strategy.model is not model
        for call in (net.state_dict, lambda: copy.deepcopy(net), lambda: make(strategy="ddp").fit(net, loader())):
            with pytest.raises(LayoutError):
                call()
        weights = whole(other)
        assert other.strategy.model.unwrap() is net
        assert_same(weights, dict(net.state_dict()))
        twin = copy.deepcopy(net)
        for each in (net, twin):
            make(strategy="ddp").fit(each, loader())
        assert_same(dict(net.state_dict()), dict(twin.state_dict()))
        twin.zero_grad()  # DDP leaves gradients
        make().fit(twin, loader())


@pytest.mark.slow
def test_a_module_goes_from_trainer_to_trainer(cluster, tmp_path):
    cluster.run(between_trainers, 2, tmp_path)


def refusals(group: Any, folder: Path) -> None:
    with session(group, folder):
        make = sharded(group, folder)
        with pytest.raises(LayoutError, match="WholeParameters"):
            make().fit(module(optimizer=lambda params: torch.optim.Adafactor(params)), loader())


@pytest.mark.slow
def test_an_optimizer_that_is_not_elementwise_is_refused(cluster, tmp_path):
    cluster.run(refusals, 2, tmp_path)


ALONE = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import shardlite.integrations.lightning


class Alone(BoringModel):
    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint("alone.ckpt")


Trainer(strategy="shardlite", accelerator="cpu", devices=2, max_epochs=1, logger=False).fit(Alone())
"""


@pytest.mark.slow
def test_a_checkpoint_of_rank_0_alone_ends_in_an_error(tmp_path):
    """Lightning starts the other rank."""
    (tmp_path / "alone.py").write_text(ALONE)
    done = run_process("alone.py", folder=tmp_path, warnings="ignore")
    assert done.status != 0
    assert "CommError" in done.err
    assert not (tmp_path / "alone.ckpt").exists()


def test_names_and_options():
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    for registry, kind in ((StrategyRegistry, ShardLiteStrategy), (STRATEGY_REGISTRY, ShardLiteFabricStrategy)):
        assert isinstance(registry.get("shardlite"), kind)
        for stage in range(4):
            strategy = registry.get(f"shardlite_stage_{stage}")
            assert strategy._options == {"stage": stage}
        with pytest.raises(TypeError, match=r"unknown options \['stages'\]"):
            kind(stages=3)
        with pytest.raises(ValueError, match="stage=4"):
            kind(stage=4)


def test_precision_that_replaces_layers_is_refused():
    plugin = type("BitsandbytesPrecision", (), {})()
    with pytest.raises(ValueError, match="BitsandbytesPrecision"):
        _refuse_precision(plugin)


def test_other_packages_of_lightning_are_refused(monkeypatch):
    name = "shardlite.integrations.lightning"
    monkeypatch.delitem(sys.modules, name)
    for package in [each for each in sys.modules if each == "lightning" or each.startswith("lightning.")]:
        monkeypatch.delitem(sys.modules, package)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match=r"pip install 'shardlite\[lightning\]'"):
        importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", types.ModuleType("pytorch_lightning"))
    with pytest.raises(ImportError, match=r"from lightning\.pytorch import"):
        importlib.import_module(name)
