# Tandem's commands. A fresh Debian or Ubuntu needs python3 (3.11 to 3.14) with venv, a C++ compiler and make; the rest
# is set up in .venv. PYTHON=/path/to/python chooses another interpreter, TANDEM_NO_NATIVE=1 builds without a compiler.

comma := ,
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))

# Everything that decides what stands in the venv: change one of these and the next target installs again.
NATIVE := CMakeLists.txt $(shell find app/engine/kernels -name '*.cpp' -o -name '*.h' -o -name '*.cmake' -o -name CMakeLists.txt)
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
BUILD_TOOLS := 'scikit-build-core>=0.11' 'nanobind>=2.4' 'cmake>=3.20' 'ninja>=1.11'

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: serve
serve: $(INSTALLED)  ## fetch the default model, serve it split over two local workers, print the URL
	@exec $(BIN)/python -m app.local

.PHONY: test
test: lint model  ## lint, then every test
	$(BIN)/python -m pytest

.PHONY: lint
lint: $(INSTALLED_DEV)  ## ruff, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: model
model: $(INSTALLED)  ## fetch the models that the tests with real weights use
	$(BIN)/tandem pull smollm2
	$(BIN)/tandem pull gemma3-270m

# llama.cpp's own RPC worker and client, in a venv outside the tree: building them takes ten minutes, once.
PEERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tandem/interop-venv
$(PEERS)/bin/.complete: | $(BIN)/python
	$(BIN)/python -m venv $(PEERS)
	CMAKE_ARGS=-DGGML_RPC=ON nice $(PEERS)/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

.PHONY: interop
interop: $(INSTALLED_DEV) $(PEERS)/bin/.complete model  ## the tests against llama.cpp's own workers and client
	$(BIN)/python -m pytest tests/interop tests/contract -m interop

# Clients of other makers, in a folder of their own: they bring many packages that Tandem does not need.
CLIENTS := build/clients
CLIENT_TESTS := $(addprefix tests/api/test_,other_clients.py langchain.py anthropic_client.py)
$(CLIENTS)/.installed: pyproject.toml | $(INSTALLED_DEV)
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"], \
	    sep="\n")' | $(BIN)/pip install -q --upgrade --target $(CLIENTS) -r /dev/stdin
	touch $@

.PHONY: clients
clients: $(INSTALLED_DEV) $(CLIENTS)/.installed  ## the tests with clients of other makers, which it fetches
	PYTHONPATH=$(CLIENTS) $(BIN)/python -m pytest $(CLIENT_TESTS)

FUZZ_SECONDS := 600
.PHONY: fuzz
fuzz: $(INSTALLED_DEV)  ## hunt for bytes that a worker trips over, FUZZ_SECONDS long
	$(BIN)/pip install -q atheris
	nice $(BIN)/python -m tests.rpc.fuzz_worker $(FUZZ_SECONDS) build/fuzz/corpus

# Tests of the kernels without Python: one build folder for each way to compile them.
KERNEL_TESTS := build/kernel-tests
CROSS := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_EXE_LINKER_FLAGS=-static
define build_kernel_tests
PATH="$(CURDIR)/$(BIN):$$PATH" && \
    cmake -S tests/engine/kernels/native -B $(KERNEL_TESTS)/$(1) -G Ninja -DCMAKE_BUILD_TYPE=Release $(2) >/dev/null && \
    nice ninja -C $(KERNEL_TESTS)/$(1) --quiet -j2
endef

.PHONY: test-kernels
test-kernels: $(INSTALLED)  ## the kernels of this machine: all variants and thread counts give the same bits
	$(call build_kernel_tests,plain,)
	$(KERNEL_TESTS)/plain/test_kernels >$(KERNEL_TESTS)/bits.txt
	$(KERNEL_TESTS)/plain/test_pool

.PHONY: test-arm
test-arm: test-kernels  ## the kernels of Arm, emulated, against the bits of this machine
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || { \
	    echo "make: for Arm, install g++-aarch64-linux-gnu and qemu-user (names as in Debian)" >&2; exit 1; }
	$(call build_kernel_tests,arm,$(CROSS))
	qemu-aarch64 -cpu max $(KERNEL_TESTS)/arm/test_kernels | diff - $(KERNEL_TESTS)/bits.txt
	for cpu in cortex-a76 cortex-a53; do \
	    qemu-aarch64 -cpu $$cpu $(KERNEL_TESTS)/arm/test_kernels best | diff - $(KERNEL_TESTS)/bits.txt; done
	qemu-aarch64 $(KERNEL_TESTS)/arm/test_pool

.PHONY: test-asan
test-asan: $(INSTALLED)  ## the kernels and the pool under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call build_kernel_tests,asan,-DTANDEM_SANITIZE=address$(comma)undefined)
	$(KERNEL_TESTS)/asan/test_kernels >/dev/null
	$(KERNEL_TESTS)/asan/test_pool

.PHONY: test-tsan
test-tsan: $(INSTALLED)  ## the pool, and the kernels on it, under ThreadSanitizer
	$(call build_kernel_tests,tsan,-DTANDEM_SANITIZE=thread)
	$(KERNEL_TESTS)/tsan/test_pool
	$(KERNEL_TESTS)/tsan/test_kernels >/dev/null

.PHONY: native
native: $(BIN)/python  ## rebuild the native modules after a change in C++
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .

.PHONY: clean
clean:  ## remove the venv and everything built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@PYTHON=$${PYTHON:-$$(for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$p -c '$(SUPPORTED)' 2>/dev/null; then echo $$p; break; fi; done)}; \
	if ! $${PYTHON:-false} -c '$(SUPPORTED)' 2>/dev/null; then \
	    echo "make: Tandem needs Python 3.11 to 3.14; name one with PYTHON=/path/to/python" >&2; exit 1; fi; \
	if [ -z "$${TANDEM_NO_NATIVE:-}" ] && ! command -v c++ g++ clang++ >/dev/null; then \
	    echo "make: no C++ compiler; install g++, or set TANDEM_NO_NATIVE=1 to do without native code" >&2; exit 1; fi; \
	$$PYTHON -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Built without isolation, so that the build folder stays valid and a rebuild compiles only what changed.
$(INSTALLED): pyproject.toml $(NATIVE) | $(BIN)/python
	$(BIN)/pip install -q $(BUILD_TOOLS)
	$(BIN)/pip install -q --no-build-isolation -e .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/pip install -q --no-build-isolation -e '.[dev]'
	@touch $@
