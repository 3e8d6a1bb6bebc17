# Everything runs in a virtual environment, created on first use. A machine needs Python 3.11, make and git.
# Another Python:             make test PYTHON=python3.12
# Another environment:        make test VENV=/path/to/venv
# Small CPU-only torch build: make test UV_TORCH_BACKEND=cpu

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
SECONDS ?= 600

PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
READY := $(VENV)/.fednorms-installed
PYTEST = $(PY) -m pytest -n $(JOBS) --dist worksteal --durations=10

.DEFAULT_GOAL := help
.PHONY: help demo test test-all campaign check format docs docs-pages results tutorials index bench clean

help:  ## list all targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(READY)  ## compare seven methods on sites whose images look different, in about two minutes
	$(PY) examples/demo.py

test: check  ## check, then run the quick tests and all doctests
	$(PYTEST) -m "not slow"

test-all: check  ## check, then run all tests, including the slow ones
	$(PYTEST)

campaign: $(READY)  ## kill, damage, fuzz and fill the disk for SECONDS (default 600), and count what went wrong
	PYTHONPATH=src:. $(PY) -m tests.campaign --seconds $(SECONDS)

check: $(READY)  ## check format, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(READY)  ## format the code and fix what the linter can fix
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: $(READY)  ## build the documentation site into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-pages: index  ## write the generated pages of docs/: methods, privacy, data, results, commuting pairs
	$(PY) docs/make_methods_page.py
	$(PY) docs/make_privacy_table.py
	$(PY) docs/make_data_page.py
	$(PY) docs/make_results_page.py
	$(PY) docs/make_advise_page.py
	PYTHONPATH=. $(PY) docs/make_which_method_page.py
	PYTHONPATH=. $(PY) docs/make_commuting_page.py

results: $(READY)  ## write every results page again, from the stored runs of recipes/results
	$(PY) docs/make_results_page.py --all

tutorials: $(READY)  ## execute the notebooks of docs/tutorials and save them with their outputs
	$(PY) docs/make_tutorials.py

index: $(READY)  ## write the index that `fednorms list` reads, src/fednorms/cli/index.json
	$(PY) -m fednorms.cli.index

bench: $(READY)  ## time the loop engine against plain PyTorch
	$(PY) benchmarks/loop_overhead.py

clean:  ## remove .venv, caches and builds, but no run directories
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each test process gets one core: on small tensors a second thread costs more than a second process.
test test-all campaign: export OMP_NUM_THREADS = 1
test test-all campaign: export MKL_NUM_THREADS = 1

$(READY): pyproject.toml constraints.txt | $(UV)
	$(UV) pip install --python $(PY) --constraints constraints.txt --build-constraints constraints.txt --editable '.[dev]'
	@touch $@

# `$(error)` ends make with one line and exit code 2, before anything is written.
$(UV):
	$(if $(filter ok,$(PYTHON_VERSION)),,$(error $(BAD_PYTHON)))
	$(if $(filter ok,$(PYTHON_VENV)),,$(error $(NO_VENV)))
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv

PYTHON_VERSION = $(shell $(PYTHON) -c 'import sys; v = sys.version_info; \
    print("ok" if v >= (3, 11) else "%d.%d.%d" % v[:3])' 2>/dev/null || echo missing)
PYTHON_VENV = $(shell $(PYTHON) -c 'import ensurepip, venv; print("ok")' 2>/dev/null)
BAD_PYTHON = fednorms needs Python 3.11 or newer, but `$(PYTHON)` is $(PYTHON_VERSION) \
    (try: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.11)
NO_VENV = `$(PYTHON)` cannot make virtual environments: its ensurepip module is missing \
    (on Debian or Ubuntu: apt install python3-venv)
