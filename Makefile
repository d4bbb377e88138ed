# make demo    sets everything up and trains a small model on two tasks (DEMO_ARGS='--steps 3 --json FILE')
# make test    sets everything up and passes the whole suite
# make chaos   attacks running clusters for hours (CHAOS_ARGS='--faults 5000'); goes on where it was stopped

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast chaos check clean
PYTHON ?= python3
BIN := .venv/bin

help:
	@sed -n 's/^# make/make/p' Makefile

demo: .venv/installed
	$(BIN)/jigsaw demo $(DEMO_ARGS)

test: .venv/installed
	$(BIN)/python -m pytest

test-fast: .venv/installed
	$(BIN)/python -m pytest tests/unit

chaos: .venv/installed
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The lock file is complete, so pip must not resolve anything: it would bring packages that break the pinned ones.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch; assert torch.version.cuda is None' 2>/dev/null || \
	  { echo "the installed torch is not a working CPU build: check the package index that pip uses" >&2; exit 1; }
	touch $@
