# Set-up, build, tests. `make help` lists the targets.
#
# Each step of the set-up leaves a stamp under .venv/.stamps when it has ended well, and never before:
# an interrupted step runs again, and a finished one costs nothing. Two makes at once wait for each
# other, step by step (flock).

PYTHON ?= python3.11
VENV   := .venv
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
PIP    := $(PY) -m pip --disable-pip-version-check
PINNED := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)
LOCK   := $(if $(shell command -v flock),exec 9>.venv.lock; flock -n 9 || { echo "== waiting for another make"; flock 9; };)
QUIET  := $(if $(MAKE_TERMOUT),,--quiet)
WORKERS ?= 2
PYTEST ?= $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ARGS   ?=
DIST   ?= dist

EXT_SOURCES := setup.py $(wildcard ext/hvd_adpsgd/*/*.p[xy]* ext/c/*.c ext/c/*.h)
LAB_SOURCES := lab/setup.py $(wildcard lab/ext/hvd_adpsgd_lab/*/*.pyx lab/ext/hvd_adpsgd_lab/*/*.pxd ext/hvd_adpsgd/*/*.pxd)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help venv build test test-all test-torch lint format demo storm simulate tsan bench wheel test-packages test-schedulers docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24
	@echo "  PYTHON=python3.12, TORCH='torch==2.13.0 --index-url URL': another interpreter (3.11 or newer), another torch"
	@echo "  HOROVOD_GPU_OPERATIONS=NCCL, CC, CFLAGS, LDFLAGS, MPICC: for the builds; the last values hold"
	@echo "  ARGS='tests/unit -x': arguments for pytest, the demo, a benchmark. Studies: python -m lab.studies.X (lab/README.md)"

venv: $(STAMPS)/extension $(STAMPS)/laboratory $(STAMPS)/lab-editable $(STAMPS)/ready  ## make .venv: pinned packages, Horovod, the extension (minutes, once)

build: $(STAMPS)/extension $(STAMPS)/laboratory  ## compile what changed in ext/ and lab/ext/

test: venv $(STAMPS)/examples  ## the tests (8 minutes on two cores)
	@echo "== test: pytest $(or $(ARGS),tests)"
	@$(PYTEST) $(or $(ARGS),tests)

test-all: venv $(STAMPS)/examples  ## and those that are one more of a kind (35 minutes)
	@$(PYTEST) -m "extended or not extended" --hypothesis-profile=thorough $(or $(ARGS),tests)

test-torch: venv $(STAMPS)/examples  ## the tests of jobs and faults with torch.distributed inside super learners
	@TEST_INNER=torch $(PYTEST) $(or $(ARGS),tests/mpi tests/faults)

lint: venv  ## ruff, format, types, who may import whom
	@echo "== lint: ruff check, ruff format, mypy, lint-imports"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

format: venv  ## let ruff lay out and repair the sources
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

demo: venv $(STAMPS)/examples  ## train the acoustic model, synchronous against asynchronous
	@$(PY) -m examples.acoustic_model.demo $(ARGS)

storm: venv  ## the simulator's fault scripts on real processes: is a promise broken? (ten minutes)
	@$(PY) -m tests.storm $(or $(ARGS),--seeds 0 20)

tsan: venv  ## trainer and engine threads under ThreadSanitizer: no race is allowed (ten minutes)
	@$(PY) -m tests.tsan $(ARGS)

simulate: venv  ## a million runs of simulated jobs with faults: is a promise broken? (an hour)
	@$(PY) -m hvd_adpsgd simulate $(or $(ARGS),--seeds 0 1000000)

bench: venv  ## what averaging costs: one exchange, and steps with a straggler
	@$(PY) -m hvd_adpsgd bench $(or $(ARGS),exchange)
	@$(if $(ARGS),,$(PY) -m hvd_adpsgd bench step --straggler 0.5)

wheel: $(STAMPS)/wheel  ## dist/: an sdist, and from it a wheel for Python 3.11 and newer, checked
	@rm -rf $(DIST)
	@echo "== wheel: sdist, and a wheel made from it"
	@$(PY) -m build --no-isolation --outdir $(DIST)/built .
	@$(PY) -m build --no-isolation --outdir $(DIST)/built lab
	@echo "== wheel: auditwheel (libmpi stays outside), abi3audit"
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --strip --exclude 'libmpi.so.*' --wheel-dir $(DIST) $(DIST)/built/*.whl
	@$(VENV)/bin/abi3audit --strict $(DIST)/*.whl
	@mv $(DIST)/built/*.tar.gz $(DIST) && rm -r $(DIST)/built && ls $(DIST)

test-packages: venv  ## wheel and sdist in empty environments, on each Python that is here (minutes)
	@$(PY) -m pytest -n0 -m extended tests/packages $(ARGS)

test-schedulers: venv $(STAMPS)/schedulers  ## a Ray cluster, submitit, the schemas of Kubernetes (minutes)
	@$(PY) -m pytest -n0 -m "extended or not extended" \
	  $(or $(ARGS),tests/mpi/test_ray.py tests/mpi/test_submitit.py tests/unit/test_manifests.py)

docs: $(STAMPS)/docs  ## the documentation as a site, in out/site
	@echo "== docs: mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet $(ARGS)
	@echo "== docs: open out/site/index.html"

clean:  ## remove .venv and everything built (the Horovod in the user's cache stays)
	rm -rf $(VENV) .venv.lock build dist *.egg-info hvd_adpsgd/*/*.so
	rm -rf lab/build lab/*.egg-info lab/hvd_adpsgd_lab/*/*.so
	rm -f $(patsubst %.pyx,%.c,$(wildcard ext/hvd_adpsgd/*/*.pyx lab/ext/hvd_adpsgd_lab/*/*.pyx))
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- the set-up, step by step ------------------------------------------------------------------------

$(STAMPS)/created:
	@echo "== venv: an environment in $(VENV) from $(PYTHON)"
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) not found. Install Python 3.11 or newer, or: make venv PYTHON=python3.12"; exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1). Needed: 3.11 or newer (make venv PYTHON=python3.12)"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module (Debian, Ubuntu: apt install $(notdir $(PYTHON))-venv)"; exit 1; } >&2
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || { \
	  echo "error: $(PYTHON) has no headers (Debian, Ubuntu: apt install $(notdir $(PYTHON))-dev)"; exit 1; } >&2
	@for tool in cc c++ make; do command -v $$tool >/dev/null || { \
	  echo "error: $$tool not found (Debian, Ubuntu: apt install build-essential)"; exit 1; } >&2; done
	@$(LOCK) $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Variables of the environment that change a build: the file NAME.given has their last values, and a later
# make without them builds with these. pip takes one build of a version of torch for another, hence uninstall.
define given
$(STAMPS)/$(1).given: FORCE | $(STAMPS)/created
	@{ env | grep -E '^($(2))=' | sort | while IFS= read -r one; do \
	  printf 'export %s=%q\n' "$$$${one%%=*}" "$$$${one#*=}"; done; } >$$@.new || true
	@if [ -s $$@.new ] && ! cmp -s $$@.new $$@; then mv $$@.new $$@; \
	  else rm $$@.new; [ -e $$@ ] || touch -d @0 $$@; fi
endef
FORCE:
$(eval $(call given,torch,TORCH))
$(eval $(call given,horovod,HOROVOD_(GPU|CUDA_|NCCL_|ROCM_|BUILD_)[A-Z_]*))
$(eval $(call given,extension,CC|CFLAGS|CPPFLAGS|LDFLAGS|MPICC))

$(STAMPS)/packages: requirements.txt requirements-dev.txt $(STAMPS)/torch.given | $(STAMPS)/created
	@echo "== venv: installing torch"
	@[ ! $(STAMPS)/torch.given -nt $@ ] || $(PIP) uninstall --quiet --yes torch
	@$(LOCK) . $(STAMPS)/torch.given; $(PIP) install $(QUIET) $${TORCH:-$(PINNED)}
	@echo "== venv: installing requirements.txt and requirements-dev.txt"
	@$(LOCK) $(PIP) install $(QUIET) -r requirements.txt -r requirements-dev.txt
	@touch $@

$(STAMPS)/horovod: hvd_adpsgd/tools/build_horovod.py $(wildcard hvd_adpsgd/tools/patches/*) $(STAMPS)/horovod.given $(STAMPS)/packages
	@echo "== venv: Horovod for this torch and this MPI"
	@$(LOCK) . $(STAMPS)/horovod.given; $(PY) hvd_adpsgd/tools/build_horovod.py
	@touch $@

$(STAMPS)/editable: pyproject.toml $(STAMPS)/packages
	@echo "== venv: installing hvd_adpsgd in place"
	@$(LOCK) ADPSGD_IN_PLACE=1 $(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

$(STAMPS)/extension: $(EXT_SOURCES) $(STAMPS)/extension.given $(STAMPS)/editable | $(STAMPS)/horovod
	@echo "== build: compiling what changed in ext/"
	@$(LOCK) . $(STAMPS)/extension.given; $(PY) setup.py --quiet build_ext --inplace
	@touch $@

# With other flags all its modules are compiled again; ext/ knows its own (setup.py).
$(STAMPS)/laboratory: $(LAB_SOURCES) $(STAMPS)/extension.given | $(STAMPS)/extension
	@echo "== build: compiling what changed in lab/ext/"
	@$(LOCK) . $(STAMPS)/extension.given; again=$$([ ! $(STAMPS)/extension.given -nt $@ ] || echo --force); \
	  cd lab && ../$(PY) setup.py --quiet build_ext --inplace $$again
	@touch $@

$(STAMPS)/lab-editable: lab/pyproject.toml $(STAMPS)/packages | $(STAMPS)/laboratory
	@echo "== venv: installing the laboratory in place"
	@$(LOCK) ADPSGD_IN_PLACE=1 $(PIP) install --quiet --no-build-isolation --no-deps --editable lab
	@touch $@

$(STAMPS)/ready: | $(STAMPS)/extension $(STAMPS)/lab-editable
	@touch $@
	@echo "== venv: ready; source $(VENV)/bin/activate"

$(STAMPS)/examples: $(wildcard requirements-examples.txt) $(STAMPS)/packages
	@if [ -f requirements-examples.txt ]; then \
	  echo "== venv: installing requirements-examples.txt"; \
	  $(LOCK) $(PIP) install $(QUIET) -r requirements-examples.txt; fi
	@touch $@

$(STAMPS)/wheel: requirements-wheel.txt $(STAMPS)/packages
	@echo "== venv: installing requirements-wheel.txt"
	@$(LOCK) $(PIP) install $(QUIET) -r requirements-wheel.txt
	@touch $@

$(STAMPS)/schedulers: requirements-schedulers.txt $(STAMPS)/packages
	@echo "== venv: installing requirements-schedulers.txt"
	@$(LOCK) $(PIP) install $(QUIET) -r requirements-schedulers.txt
	@touch $@

$(STAMPS)/docs: requirements-docs.txt | $(STAMPS)/created
	@echo "== venv: installing requirements-docs.txt"
	@$(LOCK) $(PIP) install $(QUIET) -r requirements-docs.txt
	@touch $@
