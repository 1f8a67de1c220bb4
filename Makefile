# Two Python environments: .venv for the controller and the tests, build/sglang-venv for the real SGLang on the CPU.
# Variables:  TP=2                 ranks of the demo's server (default 1)
#             PYTHON=python3.12    Python >= 3.10 for .venv
#             WORKERS=2            processes of `make test`: the lab's hosts in one, the real SGLang in another, then the rest
#             FLEETDUMP_TORCH_SPEC where torch comes from, for pip (default torch==2.13.0)
#             FLEETDUMP_PIP_ARGS   further arguments for every pip call, for instance an index with CPU wheels
TP ?= 1
PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
MATRIX_ARGS ?=
FAULTS ?= nightly or not nightly
BIN := .venv/bin
STAMP := .venv/fleetdump-installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input $(FLEETDUMP_PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help system-packages setup demo test test-cases test-faults test-nightly test-matrix lint bench clean-build

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

system-packages: ## install openssh-server, strace, a C compiler, iproute2 (or name what is missing)
	@$(PYTHON) -m demo.system_packages

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: system-packages $(STAMP) ## install everything: system packages, .venv, SGLang for the CPU, the demo's model
	@$(PYTHON) -m demo.sglang_cpu.setup

demo: setup ## the whole journey with a real SGLang on the CPU (TP=2 for two ranks)
	@$(BIN)/python -m demo.run --tp $(TP)

test: setup ## all tests but the nightly ones, with coverage
	@COVERAGE_MIN=85 .ci/test -m "not nightly" --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-cases: $(STAMP) ## the diagnosis on every known case of a hang
	@$(BIN)/pytest tests/cases -q -p no:cacheprovider | $(BIN)/python -m tests.cases.summary

test-faults: system-packages $(STAMP) ## 210 faults in extractions on four hosts (FAULTS='not nightly': 30 of them)
	@mkdir -p build && rm -f build/faults.jsonl
	@FLEETDUMP_FAULTS=build/faults.jsonl $(BIN)/python -m pytest tests/lab/test_faults.py -q -p no:cacheprovider -m "$(FAULTS)" \
		| $(BIN)/python -m tests.lab.faultsummary build/faults.jsonl build/faults.json

test-nightly: setup ## the tests that repeat or take long
	@.ci/test -m nightly $(PYTEST_ARGS)

test-matrix: setup ## the tap on real servers of many releases and models (MATRIX_ARGS=--quick: a few; --fresh: all again)
	@$(BIN)/python -m tests.sglang.tensor_matrix $(MATRIX_ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import-linter, the agent's syntax for Python 3.8, every test can be collected
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/agent_python38.py
	$(BIN)/python -m pytest --collect-only --quiet --quiet -p no:cacheprovider

bench: setup ## one script a figure; each prints one JSON object (on a GPU: bench/h200/measure.sh)
	@for script in agent_call watch_cost drive diagnose_cost patch_matrix "capture_overhead --device cpu"; do $(BIN)/python -m bench.$$script || exit 1; done

clean-build: ## remove what setup and demo made (both environments too)
	rm -rf build .venv dist .coverage* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
