"""`torch.export` and `torch.jit.trace` record the module inside `gathered()`, and say so elsewhere."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import LayoutError, ShardLite
from tests.support.models.residual import WIDTH, net
from tests.support.twins.sharded import same_bits, same_states, take_step

Record = Callable[[nn.Module, Tensor], Any]


def export(module: nn.Module, x: Tensor) -> Any:
    return torch.export.export(module, (x,)).module()


def export_to_file(module: nn.Module, x: Tensor) -> Any:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found")  # weights are views of one buffer
        torch.export.save(torch.export.export(module, (x,)), file)
    file.seek(0)
    return torch.export.load(file).module()


def trace(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, x, check_trace=False)


def trace_to_file(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        file = io.BytesIO()
        torch.jit.save(trace(module, x), file)
        file.seek(0)
        return torch.jit.load(file)


def trained(group: Any, stage: int) -> ShardLite:
    """Return a model after a step, whose full weights are away where the stage lets them."""
    model = ShardLite(net(), group=group, stage=stage)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    take_step(optimizer)
    return model


@pytest.mark.stages(2, 3)
@pytest.mark.parametrize("record", [export, export_to_file, trace, trace_to_file])
def test_graphs_are_recorded_inside_gathered(group: Any, record: Record, stage: int) -> None:
    """What was recorded computes what the model does, and a file of it has the weights."""
    model, x = trained(group, stage), torch.randn(2, WIDTH)
    with model.gathered(writeback=False), torch.no_grad():
        recorded = record(model.module, x)
        output = recorded(x)
    with torch.no_grad():
        same_bits("output", output, model(x))
        if record in (export_to_file, trace_to_file):
            same_bits("outside", recorded(x), output)
    model(x).sum().backward()  # nothing is left of the recording


def export_strictly(module: nn.Module, x: Tensor) -> Any:
    return torch.export.export(module, (x,), strict=True)


def of_wrapper(model: ShardLite) -> nn.Module:
    return model


def of_module(model: ShardLite) -> nn.Module:
    return model.module


def refused(group: Any, record: Record, of: Callable[[ShardLite], nn.Module], stage: int) -> None:
    model, x = trained(group, stage), torch.randn(2, WIDTH)
    with pytest.raises(Exception, match=r"in(side)? `(with model\.)?gathered\(\)"):  # strict: PyTorch's quotes ours
        record(of(model), x)
    expected = model(x)
    expected.sum().backward()
    with model.gathered(writeback=False):
        same_bits("later", trace(model.module, x)(x), expected)


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("of", [of_module, of_wrapper])
@pytest.mark.parametrize("record", [export, trace])
def test_elsewhere_an_error_says_where(cluster, record, of, stage):
    if stage == 0 and of is of_module:
        pytest.skip("at stage 0 a module has its weights at any time")
    cluster.check(refused, 2, record, of, stage)


def test_strict_export_says_how(cluster):
    cluster.check(refused, 2, export_strictly, of_module, 3)


@pytest.mark.stages(0, 3)
def test_the_module_has_a_state_dict_inside_gathered(group: Any, stage: int) -> None:
    """Exporters and `save_pretrained` read the module's own state dict."""
    model = trained(group, stage)
    with model.gathered(writeback=False):
        inside = {name: value.clone() for name, value in model.module.state_dict().items()}
    same_states("state", inside, model.full_state_dict())
    if stage == 3:
        with model.gathered("0.inner.weight"), pytest.raises(LayoutError, match=r"or be inside `gathered"):
            model.module.state_dict()
