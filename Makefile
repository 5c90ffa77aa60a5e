# make demo    train a 100M-parameter model larger than its memory budget, on NVMe
# make test    lint, types, the test-suite, and what is installed from the wheel
# Everything is installed into .venv first; ARGS="..." is passed on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
TRIALS ?= 1000

.PHONY: demo test test-wide test-wheel lint types unit fuzz crash-test bench-io bench-step bench-commit bench-formats docs install clean

demo: install
	$(BIN)/infinity train --model llama-100m --dtype bf16 --steps 20 --host-memory 256MiB --out runs/demo --metrics-port 9471 $(ARGS)

test: install lint types unit test-wheel

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name it with make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/pytest -n 2 $(ARGS)

# What `make test` leaves out: long tables of optimizers, models and training loops, and the packages that they need.
test-wide: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,wide]'
	$(BIN)/pytest -n 2 -m wide $(ARGS)

# What a stranger gets: sdist and wheel are built, installed into a fresh environment and used by a user who owns nothing.
test-wheel: install
	$(BIN)/pytest -m wheel tests/wheel

fuzz: install
	$(BIN)/pytest tests/core/test_fuzz.py --hypothesis-profile=fuzz $(ARGS)

crash-test: install
	$(BIN)/python -W ignore tests/core/core_crash.py --trials $(TRIALS) $(ARGS)

bench-io: install
	$(BIN)/python benchmarks/bench_io.py $(ARGS)

bench-step: install
	$(BIN)/python benchmarks/bench_step.py $(ARGS)

bench-commit: install
	$(BIN)/python benchmarks/bench_commit.py $(ARGS)

bench-formats: install
	$(BIN)/python benchmarks/bench_formats.py $(ARGS)

docs: install
	$(BIN)/python -W ignore -m infinity.config > docs/settings.md
	$(BIN)/python -W ignore -m infinity.telemetry.metrics > docs/metrics.md
	PYTHONPATH=tests/core $(BIN)/python -W ignore tests/wide/wide_page.py > docs/compatibility.md

clean:
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
