# From nothing but Python 3.11+, a C++20 compiler and a package registry: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
CONSTRAINTS := constraints/dev.txt
# Only what `import unified_ddp` needs at build time; installed first, as the build is not isolated.
BUILD_NEEDS := scikit-build-core nanobind cmake ninja
CXX ?= c++
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Werror
CPP_FILES = $(wildcard csrc_shared/*.h csrc_shared/*.cc csrc_shared/tests/*.cc)
PY_DIRS = unified_ddp adapters tests benchmarks $(wildcard examples)
PYTEST_ARGS ?=
# Files of tests run side by side: many wait for ranks, or for time-outs that they are about.
TEST_WORKERS ?= 2
PYTEST_WORKERS = -n $(TEST_WORKERS) --dist loadfile
# The oldest torch that pyproject.toml allows. OLDEST_INDEX may name an index with small builds, as in
# OLDEST_INDEX='--index-url https://download.pytorch.org/whl/cpu'; PyPI's for Linux bring CUDA along, some gigabytes.
OLDEST_VENV := build/oldest
OLDEST_TORCH := $(shell sed -n 's/^torch = \["torch>=\(.*\)"\]/\1/p' pyproject.toml)
OLDEST_INDEX ?=
CONFORMANCE_ARGS ?=
FUZZ_ARGS ?=
# Models of other libraries, which are no dependencies of ours, live in an environment of their own.
PORTS_VENV := build/ports-venv
PORTS_STAMP := $(PORTS_VENV)/.stamp
PORTS_CONSTRAINTS := constraints/ports.txt
# mypy wants a package in one folder: this one shows it the package as it is installed, with the stub of the native module.
TYPED := build/typed

.PHONY: help setup demo test test-jax test-faults compare-faults test-oldest test-random-pairs fuzz soak test-ports conformance test-gpu lint format sanitize bench clean

help:
	@echo "make demo      compares torch and JAX gradients on real data (unified-ddp verify)"
	@echo "make test      runs the tests; PYTEST_ARGS='tests/core -x' narrows them"
	@echo "make test-jax  runs the JAX adapter's tests alone, examples included"
	@echo "make conformance runs PyTorch's own DDP tests on our class; CONFORMANCE_ARGS='--only join' narrows them"
	@echo "make test-faults runs the table of programs in which DDP is known to go wrong; compare-faults torch's class too"
	@echo "make test-oldest runs the README's example and the table of test-faults with torch $(OLDEST_TORCH), in a venv of its own"
	@echo "make test-random-pairs compares 200 random right pairs of torch and JAX models, none of which may be called wrong"
	@echo "make fuzz      runs 500 random programs on real ranks; FUZZ_ARGS='--seed 3' or '--program ...' replays"
	@echo "make soak      runs 10,000 steps on two ranks and looks at memory, step time, file descriptors and threads"
	@echo "make test-ports compares transformers' Flax models and a Keras model with their torch twins, in a venv of its own"
	@echo "make test-gpu  runs the GPU tests with the torch and jax that \$$(PYTHON) has"
	@echo "make lint      checks style and types; make format rewrites what it can"
	@echo "make sanitize  runs the native core's tests under address and undefined-behaviour sanitizers"
	@echo "make bench     measures the core: planning, fingerprint, cost per parameter"
	@echo "make clean     removes .venv and everything built"

setup: $(STAMP)

# torch goes first and with its exact version: without a pin, a resolver may fetch gigabytes of CUDA libraries.
$(STAMP): pyproject.toml CMakeLists.txt $(CONSTRAINTS) $(wildcard csrc_shared/*.h csrc_shared/*.cc)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) $(BUILD_NEEDS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/unified-ddp verify

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-jax: $(STAMP)
	$(BIN)/python -m pytest tests/jax $(PYTEST_WORKERS) $(PYTEST_ARGS)

# A case that did not pass is run once more: on a loaded machine some run into their own time limits.
conformance: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m conformance --retries 1 $(CONFORMANCE_ARGS)

test-faults: $(STAMP)
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

# Right pairs of random layers, of which none may be called wrong; some seven minutes on two cores.
test-random-pairs: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.random_pairs --count 200

# No weights are fetched: configurations are tiny and weights random.
test-ports: $(PORTS_STAMP)
	CUDA_VISIBLE_DEVICES= PYTHONSAFEPATH=1 $(PORTS_VENV)/bin/python -m pytest tests/ports $(PYTEST_ARGS)

$(PORTS_STAMP): pyproject.toml CMakeLists.txt $(CONSTRAINTS) $(PORTS_CONSTRAINTS) $(wildcard csrc_shared/*.h csrc_shared/*.cc)
	test -x $(PORTS_VENV)/bin/python || $(PYTHON) -m venv $(PORTS_VENV)
	$(PORTS_VENV)/bin/python -m pip install -q -c $(PORTS_CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))"
	$(PORTS_VENV)/bin/python -m pip install -q -c $(PORTS_CONSTRAINTS) $(BUILD_NEEDS) \
	  transformers keras optax pytest pytest-timeout
	PATH="$(CURDIR)/$(PORTS_VENV)/bin:$$PATH" $(PORTS_VENV)/bin/python -m pip install -q -c $(PORTS_CONSTRAINTS) \
	  --no-build-isolation '.[verify]'
	touch $@

compare-faults: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m faults
	PYTHONPATH=tests $(BIN)/python -m faults --torch

fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ_ARGS)

soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m soak

# What torch's class of that version reads of a wrapper must be there, too. Ranks run on CPUs.
test-oldest:
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install -q $(OLDEST_INDEX) torch==$(OLDEST_TORCH)
	$(OLDEST_VENV)/bin/python -m pip install -q $(BUILD_NEEDS) pytest pytest-timeout hypothesis expecttest
	PATH="$(CURDIR)/$(OLDEST_VENV)/bin:$$PATH" $(OLDEST_VENV)/bin/python -m pip install -q --no-build-isolation '.[torch]'
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 timeout 120 $(OLDEST_VENV)/bin/python \
	  -m torch.distributed.run --standalone --nproc-per-node 2 examples/torch_quickstart.py
	CUDA_VISIBLE_DEVICES= PYTHONSAFEPATH=1 $(OLDEST_VENV)/bin/python -m pytest tests/faults $(PYTEST_ARGS)

# Installs into $(PYTHON) itself and fetches nothing: a machine with a GPU brings its own torch and jax. A safe path
# keeps the source folder, which has no native module, from hiding what was installed, in child processes too. JAX takes
# its GPU, which the other tests keep it from, and no more of the memory than it needs.
test-gpu:
	@if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then \
	  echo "test-gpu skipped: nvidia-smi finds no GPU on this machine"; \
	else \
	  $(PYTHON) -m pip install -q --no-build-isolation --no-deps --no-index . && \
	  JAX_PLATFORMS= XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONSAFEPATH=1 \
	    timeout 300 $(PYTHON) -m pytest -m gpu tests/torch/programs/test_gpu.py $(PYTEST_ARGS); \
	fi

lint: $(STAMP)
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	rm -rf $(TYPED) && mkdir -p $(TYPED)/unified_ddp
	ln -s $(CURDIR)/unified_ddp/* $(CURDIR)/adapters/torch $(CURDIR)/adapters/jax \
	  $(CURDIR)/$(VENV)/lib/python3*/site-packages/unified_ddp/_core.pyi $(TYPED)/unified_ddp
	cd $(TYPED) && $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml -p unified_ddp
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(STAMP)
	$(BIN)/ruff check --fix $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/clang-format -i $(CPP_FILES)

sanitize:
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g $(WARNINGS) $(SANITIZE) -Icsrc_shared csrc_shared/tests/core_test.cc -o build/core_test
	build/core_test

bench: $(STAMP)
	$(BIN)/python benchmarks/core.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
