# The commands of this project. On a fresh machine they need make, bash and what tools/setup_env.sh names.
#
#   make demo                the bundled pair answers a prompt with every method, on the CPU
#   make demo EXTRA=cuda12   the same on an NVIDIA GPU (or cuda13; see "One environment" below)
#   make test                lint, then the test suite
#   make gate                every kernel and the whole 27B round compile for two RTX A6000 and for an A100, none of which
#                            need be there
#   make lint                ruff and the type checker
#   make format              ruff's formatter and its safe fixes
#   make env                 only the set-up of `make test`; make aot-env that of `make gate`
#   make lock                pin newer versions (needs uv): make lock ARGS=--upgrade
#   make clean               the environments and every cache in this checkout
#
# Variables: VENV (folder of the environment; $(VENV)-aot is that of the gate), PYTHON (interpreter to make it with),
# JOBS (test processes), ARGS (more arguments for generate, pytest, the gate or the lock script).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.PHONY: demo test gate lint format env aot-env lock clean

EXTRA ?= cpu
VENV ?= .venv
JOBS ?= $(shell nproc)
PROMPT ?= Tell me about owls
ARGS ?=

BIN := $(VENV)/bin
AOT := $(VENV)-aot
STARTED := $(shell date +%s)
took = echo "make $@: $$(($$(date +%s) - $(STARTED))) s in all, set-up included"

# One environment holds several locks, which never contradict each other, but only one kind of CUDA: with cuda12 there,
# cuda13 needs another VENV. A stamp records that a lock is in; it is out of date when the lock or the project's
# metadata changes or a top-level package appears (an editable install knows those it was made with).
ifeq ($(EXTRA),cpu)
RUNTIME := $(if $(wildcard $(VENV)/.lock-dev),$(VENV)/.lock-dev,$(VENV)/.lock-runtime)
else ifneq ($(filter $(EXTRA),cuda12 cuda13),)
RUNTIME := $(VENV)/.lock-$(EXTRA)
OTHER := $(filter-out %-$(EXTRA),$(wildcard $(VENV)/.lock-cuda*))
$(if $(OTHER),$(error $(VENV) has $(OTHER:$(VENV)/.lock-%=%) already: name another folder with VENV= or run `make clean`))
else
$(error EXTRA=$(EXTRA): must be cpu, cuda12 or cuda13)
endif

$(VENV)/.lock-%: locks/%.txt pyproject.toml tools/setup_env.sh $(wildcard */__init__.py)
	@PYTHON="$(PYTHON)" tools/setup_env.sh $(VENV) $<
	@touch $@

# An environment of its own: with the CUDA plug-in and no GPU, JAX complains in every other program.
$(AOT)/.lock-aot: locks/aot.txt pyproject.toml tools/setup_env.sh $(wildcard */__init__.py)
	@PYTHON="$(PYTHON)" tools/setup_env.sh $(AOT) $<
	@touch $@

demo: $(RUNTIME)
	@$(BIN)/python -m dflash_jax.generate --compare --prompt "$(PROMPT)" $(ARGS)
	@$(took)

env: $(VENV)/.lock-dev $(if $(filter-out cpu,$(EXTRA)),$(RUNTIME))

aot-env: $(AOT)/.lock-aot

lint: $(VENV)/.lock-dev
	@$(BIN)/ruff check
	@$(BIN)/pyrefly check

# loadfile: the tests of one file share compiled functions and fixtures, so they stay in one process.
test: env aot-env lint
	@AOT_PYTHON=$(AOT)/bin/python $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)
	@$(took)

# One line a device for each check: the kernels, and in time the whole sharded programs.
gate: aot-env
	@$(AOT)/bin/python -m pallas_kernels.aot --device a6000 $(ARGS)
	@$(AOT)/bin/python -m pallas_kernels.aot --device a100 $(ARGS)
	@$(AOT)/bin/python -m benchmarks.whole_program --device a6000 --tp 2 --limit 45
	@$(AOT)/bin/python -m benchmarks.whole_program --device a100
	@$(took)

format: $(VENV)/.lock-dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

lock:
	@tools/lock.sh $(ARGS)

clean:
	rm -rf $(VENV) $(AOT) .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
