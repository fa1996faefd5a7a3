"""Parameters of kernels and device functions."""

import importlib
import inspect
import pkgutil

import pytest
import shardlite_kernels
from triton.runtime.jit import JITFunction

MOST = 17  # those of a kernel that adds rows: three say where a part of the rows lies
MODULES = [
    importlib.import_module(f"shardlite_kernels.{each.name}")
    for each in pkgutil.iter_modules(shardlite_kernels.__path__)
]
FUNCTIONS = {
    f"{module.__name__}.{name}": function
    for module in MODULES
    for name, function in vars(module).items()
    if isinstance(function, JITFunction) and function.__module__ == module.__name__
}


def test_all_kernels_are_found():
    assert len([name for name in FUNCTIONS if name.endswith("_kernel")]) == 11


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_device_function_has_few_parameters_and_none_says_who_runs_it(name):
    parameters = inspect.signature(FUNCTIONS[name].fn).parameters
    assert len(parameters) <= MOST
    assert not [each for each in parameters if "INTERPRET" in each]
