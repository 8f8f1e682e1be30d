# setup, train and test work on a machine that has Python 3.11, git and make; each runs setup first when needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# More than the two cores of a small machine: tests of servers and processes wait as much as they compute.
WORKERS ?= 3
# Whole files go to the workers; what each test took is in build/tests.xml, and the longest are printed at the end.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
  --junit-xml build/tests.xml --durations 25 --durations-min 2
PLUGINS := $(sort $(wildcard plugins/agentrig-*))
READY := $(VENV)/.ready

.PHONY: setup train test test-slow test-browser gpu docs site bench lint dev lock clean

setup: $(READY)

$(READY): $(wildcard requirements/*) pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
	@# requires-python is the only list of supported versions; this message also works with a Python without tomllib.
	@$(PYTHON) -c 'import re, sys; v = sys.version_info; \
	  line = [l for l in open("pyproject.toml") if l.startswith("requires-python")][0]; \
	  low, high = [(3, int(m)) for m in re.findall(r"3\.(\d+)", line)]; \
	  sys.exit(0 if low <= v[:2] < high else "agentrig needs Python 3.%d to 3.%d; this is %d.%d. " \
	  "Name another: make PYTHON=python3.%d setup" % (low[1], high[1] - 1, v[0], v[1], low[1]))'
	$(PYTHON) requirements/environment.py $(VENV)
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e . $(addprefix -e ,$(PLUGINS))
	@touch $@
	@echo "agentrig is in $(BIN): . $(BIN)/activate"

train: setup
	$(BIN)/agentrig train

test: setup
	$(PYTEST) $(ARGS)

# What takes long: Ray clusters, wheels in fresh environments, killed runs, most of the planted faults.
test-slow: setup
	$(PYTEST) -m slow $(ARGS)

# The pages in a real browser: Playwright and axe-core from here, Chromium from the system (Debian: apt install chromium).
test-browser: setup
	$(BIN)/uv pip install -q --python $(BIN)/python playwright==1.65.2 axe-playwright-python==0.1.7
	$(BIN)/python -m pytest -q tests/view/test_browser.py

# On a machine with one NVIDIA GPU, with the environment of docs/gpu.md: how runs end on a small, full or limited card.
GPU_PYTHON ?= $(firstword $(wildcard .venv-gpu/bin/python) python3)
gpu:
	@mkdir -p build
	$(GPU_PYTHON) tests/benchmarks/gpu_bad_input.py --json build/gpu_bad_input.json $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

dev: setup
	$(BIN)/pre-commit install

docs: site
	AGENTRIG_SITE=site $(BIN)/python -m pytest -q tests/docs

site: setup
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/python tests/benchmarks/rollouts.py
	$(BIN)/python tests/benchmarks/rollouts.py --memory 5000
	$(BIN)/python tests/benchmarks/exec_match.py
	$(BIN)/python tests/benchmarks/embedded_server.py

# Write the installed versions to the lock file; test them first.
lock: setup
	$(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | grep -v -e '^torch==' -e '^uv==' > requirements/cpu.lock

clean:
	rm -rf $(VENV) build site
