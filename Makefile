# make demo    train a 100M-parameter model that exceeds its memory budget, on NVMe
# make quick   run linters, type checks and unit tests, in about a minute
# make test    run linters, type checks, the test suite, and tests of the installed wheel
# Each target first installs the project into .venv. ARGS="..." passes arguments to the command of a target.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
TRIALS ?= 1000
STORMS ?= 300
VERSIONS ?= 2.11 2.13 newest

# Python for `make gpu-test` and `make bench-gpu`. Set it to another Python with torch for its GPU, pytest, hypothesis,
# rich and transformers to run the sources of this checkout without installing packages.
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
SOURCES := $(CURDIR):$(CURDIR)/tools:$(CURDIR)/daemon:$(CURDIR)/tests

# Unit tests that start no processes, for `make quick`.
QUICK := tests/io/test_io_contract.py tests/telemetry tests/store/test_store.py \
  tests/store/test_stripe_weights.py tests/schedule/test_pager.py tests/schedule/test_planner.py tests/content/test_layout.py \
  tests/structure/test_imports.py tests/docs/test_docs.py tests/docs/test_figures.py \
  tests/docs/test_settings_page.py tests/docs/test_site.py

.PHONY: demo quick test examples test-torch test-wide test-wheel lint types unit fuzz crash-test fault-matrix bench-io bench-step bench-checkpoint bench-daemon bench-formats bench-plan bench-tune bench-commands bench-gather bench-host bench-engines bench-first-step bench-activations bench-copies bench-network bench-peers bench-gpu gpu-test docs docs-pictures docs-site install clean

# Each demo writes to a new folder, runs/TIME, so that it does not overwrite an earlier one.
demo: install
	$(BIN)/infinity train --model llama-100m --max_steps 20 --host-memory 256MiB --metrics-port 9469 $(ARGS)

# Linters, type checks and the tests of the wheel use one core each, so they run two at a time.
test: install
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types test-wheel
	$(MAKE) --no-print-directory unit

quick: install lint types
	$(BIN)/pytest -n 2 --dist worksteal $(QUICK) $(ARGS)

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
	$(BIN)/python tests/prose.py --check

types: install
	$(BIN)/mypy

# worksteal keeps neighboring tests on one worker, so that their in-memory reference is computed only once.
unit: install
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

# Tests that `make test` omits: long tables of optimizers, models and training loops with the packages that they need,
# and the remaining rows of tables from which `make test` takes one row of each kind (tests/support/tables.py).
# s3fs and datasets need different versions of fsspec, so s3fs is in a folder of its own.
test-wide: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,wide]'
	$(BIN)/pytest -n 2 --dist worksteal -m wide $(ARGS)
	$(BIN)/pip install --quiet --upgrade --target $(VENV)/s3 s3fs 'moto[server]>=5'
	rm -rf $(VENV)/s3/fsspec*
	PYTHONPATH=$(VENV)/s3 $(BIN)/pytest -m wide tests/wide/test_mirror_on_s3.py

# Build sdist and wheel, install them into a fresh environment, and use them as a user without write access to it.
test-wheel: install
	$(BIN)/pytest -m wheel tests/wheel

# Parity, private names, unsupported setups and formats with other releases of torch, each in a separate environment.
# Not a part of `make test`, because it downloads gigabytes, but run for each release of infinity.
# ARGS="--environments FOLDER" keeps the environments. ARGS="--transformers 5.14" selects a release of transformers.
test-torch: install
	$(BIN)/python tests/torch_versions.py $(VERSIONS) $(ARGS)

# GPU tests: bitwise parity with deterministic algorithms, and data races with the CUDA sanitizer of torch. Two ranks
# are tested if there are two GPUs. Fails with a message if there is no GPU.
gpu-test: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),install)
	PYTHONPATH=$(SOURCES) TORCH_CUDA_SANITIZER=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 \
	  $(GPU_PYTHON) -m pytest -p support.gpu -m gpu $(GPU_TESTS) $(ARGS)

# Run the programs in examples/ as a user would.
examples: install
	$(BIN)/pytest tests/examples -m 'not wheel' $(ARGS)

fuzz: install
	$(BIN)/pytest tests/checkpoint/test_fuzz.py --hypothesis-profile=fuzz $(ARGS)

crash-test: install
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.crash --trials $(TRIALS) $(ARGS)
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.interrupt_storm --storms $(STORMS)

# Faults of a node (killed, link cut, drive removed, ...) in every mode of a run and at every moment. Requires root.
fault-matrix: install
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.node_faults $(ARGS)

bench-io: install
	$(BIN)/python benchmarks/bench_io.py $(ARGS)

bench-step: install
	$(BIN)/python benchmarks/bench_step.py $(ARGS)

bench-checkpoint: install
	$(BIN)/python benchmarks/bench_checkpoint.py $(ARGS)

bench-copies: install
	$(BIN)/python -W ignore benchmarks/bench_copies.py --nvme . $(ARGS)

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

# Step times on two nodes, which are network namespaces with a limited link. Requires root, ip and tc.
bench-network: install
	PYTHONPATH=$(SOURCES) $(BIN)/python -W ignore benchmarks/bench_network.py $(ARGS)

bench-commands: install
	$(BIN)/python benchmarks/bench_commands.py $(ARGS)

# Comparison with DeepSpeed, FSDP2 and torch. DeepSpeed is installed into a separate environment, .peers, and compiled
# there, which requires a C++ compiler and the headers of libaio. The complete benchmark takes hours;
# ARGS="--sizes 100m --tokens 512 --ranks 1" runs a part of it.
bench-peers: install
	$(BIN)/python -W ignore benchmarks/bench_peers.py --environment .peers $(ARGS)

bench-plan: install
	$(BIN)/python -W ignore benchmarks/bench_plan.py $(ARGS)

bench-formats: install
	$(BIN)/python benchmarks/bench_formats.py $(ARGS)

bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),install)
	PYTHONPATH=$(SOURCES) $(GPU_PYTHON) -W ignore benchmarks/bench_gpu.py $(ARGS)

bench-host: install
	$(BIN)/python -W ignore benchmarks/bench_host.py $(ARGS)

bench-tune: install
	$(BIN)/python -W ignore benchmarks/bench_tune.py $(ARGS)

docs: install
	for page in settings daemon-settings metrics doctor cli; do \
	  PYTHONPATH=tests $(BIN)/python -W ignore -m support.reference_pages $$page > docs/reference/$$page.md || exit; \
	done
	PYTHONPATH=tests $(BIN)/python -W ignore -m wide.wide_page > docs/reference/compatibility.md
	$(BIN)/python docker/grafana/dashboard.py > docker/grafana/dashboards/infinity.json

# Write pictures of commands to docs/images. Requires chromium. ARGS="plan top" selects commands.
docs-pictures: install
	$(BIN)/python docs/pictures.py $(ARGS)

# Build the documentation and the API reference into build/site. Warnings are errors. The test suite builds it, too.
docs-site: install
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV) .peers runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
