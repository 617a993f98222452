# Developer commands. Each one first sets up .venv if it has to; the second time it starts at once.
#
#   make test                    uses .venv, built with $(PYTHON) from constraints.txt
#   make test PY=python3         uses that Python as it is: no .venv, no network
#   make bench ARGS="--help"     ARGS goes to the command behind bench, test, test-gpu, demo and exercise

SHELL  := /bin/sh
PYTHON ?= python3
VENV   := .venv
ARGS   ?=
JOBS   ?= auto

ifdef PY
  NEEDS      :=
  NEEDS_DOCS :=
  OPENCONV   := $(PY) -c 'from openconv.cli import app; app()'
  GPU_PY     := $(PY)
else
  PY         := $(VENV)/bin/python
  NEEDS      := $(VENV)/.installed-dev
  NEEDS_DOCS := $(VENV)/.installed-docs
  OPENCONV   := $(VENV)/bin/openconv
  GPU_PY     := $(firstword $(wildcard $(VENV)/bin/python) $(PYTHON))
endif

# Also for the processes that tests start, and for a Python that openconv is not installed in.
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
.PHONY: help demo test check kernels format test-gpu exercise bench docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(NEEDS) ## convolve, explain and compare on this machine
	$(OPENCONV) demo $(ARGS)

# A passive wait keeps the OpenMP pools of several workers from spinning on each other's cores.
test: $(NEEDS) ## the tests, but for wide sweeps (ARGS="-m slow"); those that need a GPU say so and skip
	OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --timeout 900 \
	    --hypothesis-profile ci -m "not slow" $(ARGS)

check: $(NEEDS) ## lint, formatting and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

kernels: $(NEEDS) ## compile every GPU kernel that can be chosen, without a GPU; fails on a spill
	$(OPENCONV) compile --arch sm_80 --arch sm_90a --no-show

format: $(NEEDS) ## rewrite Python and CUDA sources in the house style
	$(PY) -m ruff check --fix --exit-zero
	$(PY) -m ruff format
	find src \( -name '*.cu' -o -name '*.cuh' \) -exec $(VENV)/bin/clang-format -i {} +

test-gpu: ## the tests that need a CUDA device, with PY, else .venv, else python3; installs nothing
	$(GPU_PY) -m pytest tests/gpu $(ARGS)

exercise: $(NEEDS) ## grade exercise N of the tutorial: make exercise N=1
	@case '$(N)' in [1-9]|0[1-9]|1[0-6]) ;; *) echo "which exercise? make exercise N=1, up to N=16" >&2; exit 2 ;; esac
	$(PY) -m pytest tutorial/exercises/test_ex$$(printf '%02d' $(N:0%=%)).py $(ARGS)

bench: $(NEEDS) ## verify, time and record under benchmarks/results
	$(PY) -m openconv.cli bench $(ARGS)

# The site takes the report and a page of traces in, and is built strictly: a link or an anchor that leads nowhere fails it. (With --quiet
# MkDocs would not count its warnings, and pass.)
docs: $(NEEDS_DOCS) ## regenerate the tables from the recorded results, build the site in build/docs
	$(PY) -m openconv.bench.report
	rm -rf build/report
	$(PY) -m openconv.cli report --out build/report --layers none
	$(PY) -m openconv.cli trace --output build/report/trace.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo "docs: build/docs/index.html, build/docs/report/report.html"

# Compiled kernels in the user's cache directory are keyed by their source and never stale: they stay.
clean: ## remove build outputs and caches, Numba's too; keeps .venv and recorded results
	rm -rf build dist openconv-demo openconv-examples .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find src tests docs tutorial benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# --- .venv ------------------------------------------------------------------------------------------------

# A Python without venv or ensurepip, or too old, gets one sentence rather than a traceback.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
	    command -v $(PYTHON) >/dev/null || { \
	        echo "$(PYTHON) was not found. Name a Python: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	        echo "openconv needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	        echo "Name another one: make PYTHON=python3.12" >&2; exit 1; }; \
	    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	        echo "$(PYTHON) cannot create a virtual environment: its venv or ensurepip module is missing." >&2; \
	        echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	    echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing openconv[$*] into $(VENV) (takes minutes the first time)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
