# Needs python3 (3.11 or newer), make and a package index; everything lands in .venv.

PYTHON ?= python3
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/installed
# The tests of a file share compiled programs: they stay in one process.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# Tests are small and many: most of their time is compiling, less of it for slower code.
# `test-all` compiles as users do.
COMPILE_FAST := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help atlas test test-all lint format docs wheel bench clean
.DELETE_ON_ERROR:

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

atlas: $(INSTALLED)/base ## run every experiment, write atlas/index.html (ARGS="--full")
	$(BIN)/meanformer atlas $(ARGS)

test: export XLA_FLAGS += $(COMPILE_FAST)
test: $(INSTALLED)/tests ## the fast tests (ARGS="-k softmax")
	$(PYTEST) -m "not slow and not browser" $(ARGS)

test-all: $(INSTALLED)/tests ## every test, slow ones too; in a browser if there is a Chromium
	$(PYTEST) $(if $(shell command -v chromium),,-m "not browser") $(ARGS)

lint: $(INSTALLED)/dev ## format, style, types, order of the rooms
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports

format: $(INSTALLED)/dev ## format the code, repair what ruff can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(INSTALLED)/docs ## build docs/_build/html, warnings are errors
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html

wheel: $(INSTALLED)/base ## build the wheel, install it where there is nothing, run it
	.ci/wheel $(BIN)/python

bench: $(INSTALLED)/bench ## speed and memory against PyTorch, KeOps and dense JAX
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## forget the environment and everything built
	rm -rf $(VENV) docs/_build docs/jupyter_execute atlas benchmarks/results

# One stamp per group of packages: a target installs what it needs, once.
# Dependency groups need pip 25.1, newer than the one many Pythons bring.
$(INSTALLED)/base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) --editable ".[transport,fourier]"
	@mkdir -p $(@D) && touch $@

$(INSTALLED)/%: $(INSTALLED)/base
	$(PIP) --group $*
	@touch $@
