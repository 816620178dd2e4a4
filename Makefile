# Everything runs inside .venv, which `make install` makes; nothing is compiled.

PYTHON ?= python3
# What is installed where .venv has no torch that fits. For GPUs that need another build of it:
#   make install TORCH='torch==2.13.0 --index-url URL'
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/installed

# Operators that DeepSpeed or torch build on demand (none by default) stay in this environment.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.venv/torch_extensions
# The deepspeed command starts whatever python comes first.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Packages of the lists in requirements/: these versions, and files with these hashes. Those that
# come as source are built with what build.txt has installed. DeepSpeed compiles nothing.
INSTALL = DS_BUILD_OPS=0 $(BIN)/python -m pip install --require-hashes --no-deps --no-build-isolation

.PHONY: help install lock audit quickstart test suite proof null-gpu docs dist notebooks bench bench-gpu lint clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*##/  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP)  ## make .venv with everything in it, once

$(STAMP): setup.py requirements/build.txt requirements/base.txt requirements/test.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo \
	    "$(PYTHON) is older than Python 3.10: make install PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --quiet -r requirements/build.txt
	$(INSTALL) -r requirements/base.txt -r requirements/test.txt
	@$(BIN)/python -c 'import torch; v = torch.__version__.split(".")[:2]; \
	    raise SystemExit(not (2, 11) <= tuple(map(int, v)) < (2, 14))' 2>/dev/null \
	    || { set -x; $(BIN)/python -m pip install $(TORCH); }
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-index -e .
	@touch $@

lock: $(STAMP)  ## write requirements/ from setup.py; UPGRADE=1 takes the newest versions
	$(BIN)/python -m pip install --quiet 'uv>=0.5'
	PATH=$(BIN):$$PATH $(BIN)/python requirements/lock.py $(if $(UPGRADE),--upgrade)

# Its environment is its own, and nothing of the lists is installed for it.
audit: .venv/audit/bin/pip-audit  ## look for requirements/ in the lists of known vulnerabilities
	for list in requirements/*.txt; do $< --strict --disable-pip --require-hashes -r $$list || exit 1; done

.venv/audit/bin/pip-audit:
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet 'pip-audit>=2.9,<3'

quickstart: $(STAMP)  ## train a small GPT on Python's own source files, and export it
	$(BIN)/python tools/quickstart.py

docs: $(BIN)/docs-installed  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site"

# The packages for it are installed when it is first built, or by .ci/run.
$(BIN)/docs-installed: $(STAMP) requirements/docs.txt
	$(INSTALL) --quiet -r requirements/docs.txt
	@touch $@

# TAG=v0.1.0 also compares the tag that is to be published with version and changelog (RELEASING.md).
dist: $(BIN)/release-installed  ## build and check the wheel and the source archive in dist/
	$(BIN)/python release/check.py $(if $(TAG),--tag $(TAG))

notebooks: $(BIN)/notebooks-installed  ## run the notebooks, and keep their output in them
	$(BIN)/python examples_deepspeed/notebooks/run.py

$(BIN)/release-installed $(BIN)/notebooks-installed: $(BIN)/%-installed: $(STAMP) requirements/%.txt
	$(INSTALL) --quiet -r requirements/$*.txt
	@touch $@

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

# Tests of one file share a worker process, and with it the ranks that it has started. Those of
# several files work next to each other, so that none may hold a core for itself.
# They wait for the processes that they start, so that two cores have room for a third.
WORKERS ?= 3
# Compiled modules are kept between the processes of a run, whatever the environment says.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_PROC_BIND=false $(BIN)/python -m pytest --workers $(WORKERS)

# The tests are collected by one process: mypy has another core meanwhile.
test: $(STAMP)  ## ruff, mypy and tests of less than 1.5 s; WHOLE=1 runs the whole suite
	$(MAKE) --jobs=2 lint suite

suite:
	$(PYTEST) -m 'not proof$(if $(WHOLE),, and not slow)'

# What was seen to pass on this code is in tests/ledger.jsonl, and is not run again (tests/ledger.py).
proof: lint  ## the long tables that are not proven on this code; MINUTES=60 stops, PART=2/4 is a part
	$(PYTEST) -m '' --stale $(if $(MINUTES),--minutes $(MINUTES)) $(if $(PART),--part $(PART))

# A build for GPUs, 3 GB; what else is needed is that of .venv. Counts are of this version.
NULL_GPU_TORCH ?= torch==2.11.0
NULL_GPU := .venv/null-gpu

null-gpu: $(NULL_GPU)/installed  ## count what a step asks of GPUs, without one; REWRITE=1 records it
	$(NULL_GPU)/bin/python tests/nullgpu/table.py $(if $(REWRITE),--rewrite) $(if $(CELLS),--cells '$(CELLS)')

$(NULL_GPU)/installed: $(STAMP)
	$(BIN)/python -m venv $(NULL_GPU)
	$(NULL_GPU)/bin/python -m pip install --quiet '$(NULL_GPU_TORCH)'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    $$($(NULL_GPU)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	@touch $@

bench: $(STAMP)  ## a training step on the CPU against its peers (docs/evidence/benchmarks.md)
	mkdir -p benchmarks/results
	for vocabulary in 50304 8192; do \
	    $(BIN)/python benchmarks/train.py --vocab-size $$vocabulary --rounds 9 \
	        --json benchmarks/results/cpu-$$vocabulary.json || exit 1; done

bench-gpu: $(STAMP)  ## measurements and tests for one GPU; continues where it was stopped
	$(BIN)/python benchmarks/gpu.py

clean:  ## remove runs/quickstart and what the tools leave behind; .venv stays
	rm -rf runs/quickstart build dist site *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
