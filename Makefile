# `make demo` and `make test` set everything up by themselves: a virtual environment in .venv with the tested versions.
PYTHON ?= python3
RANKS ?=
BIN := .venv/bin

.PHONY: help demo test lint bench clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-6s %s\n", $$1, $$2}'

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: .venv/ready  ## train a GPT on real text on each GPU, or over 2 ranks (RANKS=4 for more)
	$(BIN)/shardlite train $(if $(RANKS),--ranks $(RANKS))

test: .venv/ready  ## run the whole test suite
	$(BIN)/python -m pytest

lint: .venv/ready  ## format check, linter, type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/ready  ## step time and memory beside FSDP2 and DDP; rows go to bench/results
	$(BIN)/python -m bench.step --ranks $(or $(RANKS),2)

clean:  ## remove the virtual environment and what the demo wrote
	rm -rf .venv outputs
