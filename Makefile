# `make demo` and `make test` are all that a fresh machine needs: Python, make, g++ and venv.

PYTHON ?= python3
VENV ?= .venv
# Where torch comes from, if not from PyPI. For instance, for the build without CUDA:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# It counts when the environment is made; `make clean` first to change it.
TORCH_INDEX ?=
DEMO ?=
PYTEST ?=
# Processes that run the tests, one thread each.
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# Threads that wait for work must not spin: with few cores they take them from those that have some.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH_INDEX=URL  DEMO='--prompts 100'  PYTEST='-k name'"

demo: $(VENV)/installed ## install, then decode real prompts with the bundled target
	$(BIN)/acceptmoe demo $(DEMO)

test: $(VENV)/installed-dev ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST)

check: $(VENV)/installed-dev ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/installed-dev ## rewrite the sources as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The installation is editable, so only a change of what it consists of makes it anew.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing acceptmoe into $(VENV)"
	$(if $(TORCH_INDEX),$(INSTALL) --no-deps --index-url $(TORCH_INDEX) torch)
	$(INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing what the tests need into $(VENV)"
	$(INSTALL) --editable ".[dev]"
	@touch $@
