# Everything runs from .venv, which `make setup` creates; test-gpu and bench-gpu alone use the PYTHON
# given. TORCH names the build of torch to install: one without CUDA is enough for all but these. On
# a machine with a GPU: make setup TORCH='torch>=2.11,<2.14'

PYTHON ?= python3
TORCH  ?= torch==2.13.0

# The package whose EAGLE-3 model the tests compare ours with. It pins an older transformers than we
# use and its data pipeline needs much that no test does, so it goes in without its dependencies but
# those that its import needs.
REFERENCE := speculators==0.9.0
IMPORTED  := loguru pydantic-settings

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done
LOWEST := .venv-lowest
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder
# Tiny models gain nothing from a second thread. Compiled modules are kept even where the environment
# says otherwise: every process would compile all of trtspec and the tests again.
LIGHT  := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-lowest lint compiled style bench test-gpu bench-gpu kernels clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv with everything (does nothing when it is up to date)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else f"error: python {v} is too old, 3.11 or newer is needed: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev,demo]' $(IMPORTED)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(REFERENCE)
	@touch $@

demo: $(STAMP)  ## Decode the same prompts without and with speculation
	@$(BIN)/trtspec demo

# Products of parameters are run by sets that cover all pairs: tests/helpers/matrix.py. Of slow tests
# each commit runs another third (tests/conftest.py). Files go in the order of their names: long ones
# with few tests would come last otherwise, alone.
test: $(STAMP)  ## Run the tests that need no GPU, of slow ones a third, in some 8 minutes on 2 cores
	$(LIGHT) $(BIN)/python -m pytest $(SPREAD)

test-all: $(STAMP)  ## Run them with whole products, every line interrupted and all statistics
	$(LIGHT) $(BIN)/python -m pytest $(SPREAD) --full

# A build of torch without CUDA is enough: pip takes it where PIP_FIND_LINKS or
# PIP_EXTRA_INDEX_URL offers one.
test-lowest: $(LOWEST)/.setup-done  ## Run the same tests on the lowest versions that pyproject.toml allows
	$(LIGHT) $(LOWEST)/bin/python -m pytest $(SPREAD)

$(LOWEST)/.setup-done: pyproject.toml .ci/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) .ci/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -c $(LOWEST)/constraints.txt -e '.[dev,demo]' $(IMPORTED)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check --no-deps $(REFERENCE)
	@touch $@

# Without a GPU nothing else shows that a test of one calls what is no longer there.
OF_GPU_TESTS := --follow-imports=silent --allow-untyped-defs --no-warn-unused-ignores \
	$(addprefix --disable-error-code=,arg-type assignment union-attr type-var)

lint: $(STAMP)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tests/helpers:tests/gpu $(BIN)/mypy $(OF_GPU_TESTS) tests/gpu

# Collects the tests and runs none: what all processes of `test` import is compiled by one of them.
# An error in it is shown by `test`.
compiled: $(STAMP)
	-@$(LIGHT) $(BIN)/python -m pytest --collect-only -qq > $(VENV)/collected.txt

style: $(STAMP)  ## Format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## Tokens per second on this CPU, without and with speculation
	$(BIN)/trtspec bench --device cpu

# A process for each core, with one thread: what takes long is launching and compiling. Kernels are
# compiled before, or all processes would wait for the first.
test-gpu:  ## Run the GPU tests with PYTHON (no .venv), which needs pytest-xdist; names the slowest ten
	-$(PYTHON) -m trtspec.native
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m gpu -n auto --dist worksteal --durations=10

kernels: $(STAMP)  ## Compile csrc for Hopper ahead of time (needs nvcc, no GPU)
	$(BIN)/python -m trtspec.native 9.0a

bench-gpu:  ## What a step costs on the GPU, with PYTHON; ARGS="--help" lists what can be asked
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_step.py $(ARGS)

clean:  ## Remove caches and build outputs (the environments stay)
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
