# Every target sets up what it needs in $(VENV), and again only after pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread a process: the suite runs in two processes, and rank tests start up to four more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

.PHONY: help demo test test-long lint types wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       a prompt of 16K tokens over 2 local ranks, compared with one rank"
	@echo "make test       the CPU test suite"
	@echo "make test-long  the same and the long simulations and fuzzing"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy, strict"
	@echo "make wheel      build the wheel and check what is in it"
	@echo "make clean      remove $(VENV), caches and build outputs"
	@echo "PYTHON=python3.12 make ... picks the interpreter (3.11 or newer); VENV=dir the environment."

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV): torch, numpy and the model loader (a minute or two)"
	@$(PIP) --editable '.[models]'
	@touch $@

$(VENV)/.develop: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV): everything that tests, lint and types need (a few minutes)"
	@$(PIP) --editable '.[models,pretty,test,dev]'
	@touch $@ $(VENV)/.runtime

demo: $(VENV)/.runtime
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/long_prefill.py --device cpu

test: $(VENV)/.develop
	$(PYTEST)

test-long: $(VENV)/.develop
	$(PYTEST) -m "not gpu"

lint: $(VENV)/.develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.develop
	$(BIN)/mypy

wheel: $(VENV)/.develop
	@rm -rf build dist
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(BIN)/python -m zipfile --list dist/cptools-*.whl | awk 'NR > 1 && $$1 !~ /^cptools(\/|-)/ { print "not of cptools: " $$1; bad = 1 } END { exit bad }'
	@ls dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
