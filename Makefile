# Everything a person or CI runs. `make env` is done by the others when it is needed; nothing else has to be installed.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes; many tests run two more each.
WORKERS ?= 3
READY := $(VENV)/.ready
LOG := $(VENV)/install.log
comma := ,
# One resolution for every supported Python and both architectures. It names no registry.
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TOKENIZERS_PARALLELISM ?= true

.PHONY: env quickstart test coverage test-all test-oldest stores faults soak mutants findings rehearse test-slurm lint bench-data bench-saving bench-train bench-peers bench-loss bench-scaling \
	bench-finetuning bench-sweep bench-encoding bench-search bench-retrieval bench-stores bench-readers bench-gpu test-gpu bench-gpu-run docs lock clean

# $(1) explains in one line, $(2) is where the details are, $(3) is the command.
define stop
{ echo "make $(or $(3),env): $(1)$(if $(2), ($$(grep -m 1 -i ^error $(2) || tail -n 1 $(2)); all of it: $(2)))" >&2; exit 2; }
endef
VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'

env: $(READY)
ifneq ($(origin PYTHON),file)
	@command -v $(PYTHON) >/dev/null || $(call stop,PYTHON=$(PYTHON) is not a command)
	@test "$$($(PYTHON) $(VERSION))" = "$$($(BIN)/python $(VERSION))" || \
		$(call stop,$(VENV) holds Python $$($(BIN)/python $(VERSION)) and PYTHON=$(PYTHON) is another: run make clean first)
endif

$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || \
		$(call stop,there is no $(PYTHON): name a Python from 3.11 to 3.14$(comma) such as make env PYTHON=python3.12)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
		$(call stop,$(PYTHON) is Python $$($(PYTHON) $(VERSION)): name one from 3.11 to 3.14$(comma) such as make env PYTHON=python3.12)
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		$(call stop,$(PYTHON) has no venv module: install it (Debian and Ubuntu: apt install python3-venv) or name another PYTHON=)
	@echo "environment: installing the locked requirements into $(VENV) (about 8 GB on disk, a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 "$$(grep '^uv==' requirements.lock)" \
		>$(LOG) 2>&1 || $(call stop,can't install uv; is a package registry reachable?,$(LOG))
	@# Compiled here once: where Python may not write its bytecode, each start would take seconds more.
	@$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python requirements.lock \
		>$(LOG) 2>&1 || $(call stop,can't install the locked packages,$(LOG))
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable . \
		>$(LOG) 2>&1 || $(call stop,can't install biphasic itself,$(LOG))
	@touch $(READY)

quickstart: env
	$(BIN)/python recipes/quickstart/quickstart.py

# One thread a process: tiny models are slower with more.
PYTEST := -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

test: env
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow"

# `make test`, and the lines of src/ that its processes ran; those of commands that it starts are not counted.
coverage: env
	OMP_NUM_THREADS=1 $(BIN)/python -m slipcover --skip-covered --out $(VENV)/coverage.txt $(PYTEST) -m "not slow"; \
		status=$$?; echo "all files: $(VENV)/coverage.txt"; tail -n 1 $(VENV)/coverage.txt; exit $$status

# Also the long forms: many kills, whole benchmarks, thousands of generated inputs. CONTRIBUTING.md says when to run them.
test-all: env
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

# The tests that call torch, transformers and Composer most, and a run that is killed around the switch, with the oldest torch
# and transformers that pyproject.toml allows and otherwise the lock's versions, in an environment of its own: half an hour on two
# cores. Not in CI: run it before a release, and when these bounds, or what is called privately (docs/versions.md), change.
OLDEST := .venv-oldest
# Of the torch that is the bound; pyproject.toml has no bound for it.
OLDEST_TORCHVISION := 0.26.0
OLDEST_TESTS := tests/model tests/objectives tests/training tests/data tests/checkpointing tests/faults/test_kills.py

test-oldest: $(OLDEST)/.ready
	PATH="$(CURDIR)/$(OLDEST)/bin:$$PATH" OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) -m "not slow" $(OLDEST_TESTS)

$(OLDEST)/.ready: requirements.lock requirements.in pyproject.toml Makefile | env
	@# The base of .venv if that is Python 3.12, which need not be on the PATH.
	@case $$($(BIN)/python $(VERSION)) in 3.12) python=$(BIN)/python ;; *) python=3.12 ;; esac; \
		$(BIN)/uv venv --quiet --clear --python $$python $(OLDEST) || \
		$(call stop,uv finds no Python 3.12: install it or put it on the PATH,,test-oldest)
	@sed -nE 's/^    "(torch|transformers)>=([0-9.]+)".*/\1==\2/p' pyproject.toml | sort -u >$(OLDEST)/oldest.txt
	@echo "torchvision==$(OLDEST_TORCHVISION)" >>$(OLDEST)/oldest.txt
	@echo "environment: installing $$(paste -sd ' ' $(OLDEST)/oldest.txt) and what fits them into $(OLDEST)"
	@# The compiler of requirements prefers what its output lists already.
	@cp requirements.lock $(OLDEST)/oldest.lock
	@$(BIN)/uv pip compile --quiet --python-version 3.12 --no-header --no-annotate --override $(OLDEST)/oldest.txt \
		--extra all --extra loggers --extra onnx --extra dev pyproject.toml requirements.in --output-file $(OLDEST)/oldest.lock \
		>$(OLDEST)/install.log 2>&1 || $(call stop,can't resolve the oldest versions,$(OLDEST)/install.log,test-oldest)
	@$(BIN)/uv pip sync --quiet --compile-bytecode --python $(OLDEST)/bin/python $(OLDEST)/oldest.lock \
		>$(OLDEST)/install.log 2>&1 || $(call stop,can't install the oldest versions,$(OLDEST)/install.log,test-oldest)
	@$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python --no-deps --no-build-isolation --editable . \
		>$(OLDEST)/install.log 2>&1 || $(call stop,can't install biphasic itself,$(OLDEST)/install.log,test-oldest)
	@touch $(OLDEST)/.ready

# Azure's emulator and s3rver, packages of npm: their tests are skipped without them. Needs Node.js.
stores: env
	npm install --silent --no-save --no-audit --no-fund --prefix $(VENV) azurite@3 s3rver@3

# 20 kills, a bucket that is away for two minutes, stalls of half a minute: 11 minutes.
faults: env
	BIPHASIC_KILLS=20 $(BIN)/python -m pytest tests/faults

# Chains of faults, which a seed repeats: kills, signals, a failing bucket, a full disk, damaged checkpoints and shards (tests/soak.py).
soak: env
	PYTHONPATH=src:tests $(BIN)/python .ci/reaping_parent.py $(BIN)/python tests/soak.py --minutes $(or $(SOAK_MINUTES),5) \
		$(if $(SOAK_SEED),--seed $(SOAK_SEED)) $(if $(SOAK_FAULTS),--faults $(SOAK_FAULTS))

# Mutation tests of the modules in [tool.mutmut]: each mutant runs the unit tests that reach it. About an hour or two; a
# pattern limits it: make mutants MUTANTS='biphasic.objectives*'. Works in mutants/, which is ignored by git.
mutants: env
	$(BIN)/uv pip install --quiet --python $(BIN)/python "mutmut>=3.8,<4"
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(WORKERS) $(if $(MUTANTS),'$(MUTANTS)')
	$(BIN)/mutmut results

# What other libraries do against expectation (findings/README.md): which of it has changed. Half a minute each; needs a registry.
findings: env
	@changed=0; for script in findings/*.sh; do \
		output=$$($$script 2>&1) && status="as described" || { status="CHANGED, or can't be installed (status $$?)"; changed=1; }; \
		echo "$$script: $$status"; case $$status in as*) ;; *) echo "$$output" ;; esac; \
	done; exit $$changed

# The first batches of each pretraining YAML on fake GPUs and ranks: shapes, devices, graphs, FLOPs, memory.
rehearse: env
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rehearse.py

# A real Slurm on this machine, with a real preemption; needs root and Debian's slurm-wlm.
test-slurm: env
	recipes/launch/test_slurm.sh

# With the links of the documentation; those to other hosts are not followed.
lint: env docs
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/lines.py
	$(BIN)/basedpyright

# About a quarter of an hour on two cores: nothing else may run beside it. Writes benchmarks/results/.
bench-data: env
	$(BIN)/python benchmarks/data.py

# About five minutes. Writes benchmarks/results/saving.*.
bench-saving: env
	$(BIN)/python benchmarks/saving.py --stretches 4 --steps 10

# The trainer over the barest correct loop, on this machine's cores.
bench-train: env
	$(BIN)/python benchmarks/train.py

# The trainer over Hugging Face's, padded and packed.
bench-peers: env
	$(BIN)/python benchmarks/peers.py

# What the loss takes in memory, with and without logits.
bench-loss: env
	$(BIN)/python benchmarks/loss_memory.py --width 128

# One and two ranks over the barest loop's.
bench-scaling: env
	$(BIN)/python benchmarks/scaling.py

# Fine-tuning over Hugging Face's Trainer with dynamic padding.
bench-finetuning: env
	$(BIN)/python benchmarks/finetuning.py

# A sweep of 60 trials over bare training loops.
bench-sweep: env
	$(BIN)/python benchmarks/sweep.py

# Embedding a corpus over sentence-transformers.
bench-encoding: env
	$(BIN)/python benchmarks/encoding.py

# Exact search in ten thousand to a million vectors.
bench-search: env
	$(BIN)/python benchmarks/search.py

# Training for retrieval over sentence-transformers.
bench-retrieval: env
	$(BIN)/python benchmarks/retrieval.py

# What stores promise, and the tests on each that is installed (`make stores`; Ceph, Swift and faketime from Debian).
bench-stores: stores
	$(BIN)/python benchmarks/stores.py

# Who reads an export, and whose folders Biphasic reads: about ten minutes, and it needs a package registry.
bench-readers: env
	$(BIN)/python benchmarks/readers.py

# What runs on a GPU machine doesn't need `env`: it takes the environment's Python if there is one, else PYTHON.
GPU_PYTHON = PYTHONPATH=src $$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))

# Up to 10 minutes on one GPU. Needs this folder, PyTorch 2.11 and transformers 5.17 or newer. Its options are in the file:
# make bench-gpu ARGS='--sizes 1b --rows 12 --variants flex'
bench-gpu:
	PYTORCH_ALLOC_CONF=expandable_segments:True $(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

# The tests that need a GPU: 5 minutes. Those whose packages aren't installed are skipped. Needs pytest.
test-gpu:
	$(GPU_PYTHON) -m pytest -p no:cacheprovider tests/gpu

# A real run through the switch on this machine's GPUs, killed once and resumed. Needs Composer.
bench-gpu-run:
	$(GPU_PYTHON) benchmarks/gpu_run.py $(ARGS)

# The documentation as a site in site/: open site/index.html. SERVE=1 shows it on 127.0.0.1:8000 and follows changes.
docs: export NO_MKDOCS_2_WARNING := 1
docs: env
ifdef SERVE
	$(BIN)/mkdocs serve
else
	$(BIN)/mkdocs build --strict
	@echo "documentation: site/index.html"
endif

# Resolves again; needed when pyproject.toml changes. UPGRADE=1 takes the newest versions that it allows (docs/versions.md).
lock: env
	$(COMPILE) $(if $(UPGRADE),--upgrade) \
		--extra all --extra loggers --extra onnx --extra dev pyproject.toml requirements.in --output-file requirements.lock

clean:
	rm -rf $(VENV) $(OLDEST)
