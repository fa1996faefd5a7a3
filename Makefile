# Targets set up what they need, with the tested versions, in .venv (gpu-check: .venv-gpu); gpu uses PYTHON as it is.
PYTHON ?= python3
RANKS ?=
ARGS ?=
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
# Two workers: each has a cluster of two ranks, which wait for each other about as often as they compute.
# Groups of tests begin in the order of tests/conftest.py. A worker that a test has ended is not started again: the
# same test would end it again, and what hangs would do so for hours.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

GPU_BIN := .venv-gpu/bin
GPU_TESTS := tests/project/test_imports.py tests/kernels tests/comm tests/params tests/weights tests/grads tests/optim \
	tests/model/test_parity.py tests/bench/test_bench_gpu.py tests/bench/test_bench_gpu_ranks.py

.PHONY: help demo test test-all lint size changelog docs bench bench-readme check-range gpu gpu-check clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.venv/for-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[demo]'
	@touch $@

.venv/for-test: .venv/for-demo
	$(INSTALL) '.[test]'
	@touch $@

.venv/for-test-all: .venv/for-test
	$(INSTALL) '.[test,examples,docs]'
	@touch $@

.venv/for-lint: .venv/for-test
	$(INSTALL) '.[test,lint]'
	@touch $@

.venv/for-docs: .venv/for-demo
	$(INSTALL) '.[demo,docs]'
	@touch $@

demo: .venv/for-demo  ## train a GPT on real text on each GPU, or over 2 ranks (RANKS=4 for more)
	$(BIN)/shardlite train $(if $(RANKS),--ranks $(RANKS))

test: .venv/for-test  ## run the tests in minutes; ARGS="-k ring" passes arguments on to pytest
	$(PYTEST) -m "not slow" $(ARGS)

test-all: .venv/for-test-all  ## run all tests, the slow ones and those of the examples included
	$(PYTEST) $(ARGS)

lint: .venv/for-lint  ## format check, linter, type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

size: .venv/for-demo  ## lines per room and other ceilings, and what changed since the last tag or main
	$(BIN)/python tools/size.py $(ARGS)

changelog: .venv/for-lint  ## the changes since the last release, as one section (ARGS="--yes" with a new version writes it)
	$(BIN)/towncrier build --version $$($(BIN)/python -c 'import shardlite; print(shardlite.__version__)') $(or $(ARGS),--draft)

docs: .venv/for-docs  ## build the site into docs/_build; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs docs/_build

bench: .venv/for-test-all  ## all benches in 20 minutes; rows go to bench/results, tables are made anew
	$(BIN)/python -m bench $(ARGS)

bench-readme: .venv/for-test-all  ## the rows and the picture of README.md in ten minutes
	$(BIN)/python -m bench.readme $(ARGS)

check-range:  ## a wheel in clean environments, with the oldest and the newest Python and PyTorch of the range
	$(PYTHON) tools/check_range.py $(ARGS)

gpu:  ## correctness and speed on a GPU, or on 8 with ARGS="--ranks 8", in ten minutes; see docs/gpu.md
	$(PYTHON) -m bench.gpu $(ARGS)

.venv-gpu/ready: requirements-gpu.txt
	$(PYTHON) -m venv .venv-gpu
	$(GPU_BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-gpu.txt
	@touch $@

gpu-check: .venv-gpu/ready  ## what can be known of a run on a GPU without one, with the versions of PyTorch and Triton there
	$(GPU_BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder -m "not slow" $(GPU_TESTS)
	$(GPU_BIN)/python bench/kernels/aot.py --target sm_90
	$(GPU_BIN)/python -m bench.gpu --dry --out .venv-gpu/dry
	$(GPU_BIN)/python -m bench.gpu --dry --ranks 2 --out .venv-gpu/dry-ranks

clean:  ## remove the virtual environments, the site and what the demo wrote
	rm -rf .venv .venv-gpu .venv-range docs/_build outputs
