# make run    fresh clone -> .venv with locked dependencies -> the demo pipeline -> results/runs/demo/latest/report.html
# make run-two-hosts   the demo over two throwaway sshd on loopback: one trains, one judges, this process controls
# make test   linters, types and the whole test suite that needs no GPU
# make bench  benchmarks that need no GPU, one JSON line each
# make fmt    format everything

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One thread a process: the demo and the tests run several processes, and small models gain nothing from more.
export OMP_NUM_THREADS ?= 1

.PHONY: run run-two-hosts test bench fmt clean lint
.DELETE_ON_ERROR:

run: $(VENV)/ready
	$(BIN)/dflash run

run-two-hosts: $(VENV)/ready
	$(BIN)/python tests/two_hosts.py

# Files in their order: the end-to-end tests, which are few and long, begin first, and short ones fill up the end.
test: lint
	DFLASH_ZLAB_PATH=$(CURDIR)/$(VENV)/oracles/zlab DFLASH_FLA_PATH=$(CURDIR)/$(VENV)/oracles/fla \
	  $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(VENV)/ready-dev
	$(BIN)/ruff check dflash tests config
	$(BIN)/ruff format --check dflash tests config
	$(BIN)/snakefmt --check --compact-diff Snakefile workflow
	$(BIN)/mypy

bench: $(VENV)/ready-dev
	$(BIN)/python tests/bench

fmt: $(VENV)/ready-dev
	$(BIN)/ruff check --fix dflash tests config
	$(BIN)/ruff format dflash tests config
	$(BIN)/snakefmt Snakefile workflow
	$(BIN)/python -m dflash.plan.options > config/README.md

$(VENV)/ready: requirements.lock pyproject.toml
	@echo "installing the locked dependencies into $(VENV) (a minute or two, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --requirement requirements.lock
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready requirements-dev.lock requirements-oracles.lock
	$(PIP) --requirement requirements-dev.lock
	$(PIP) --no-deps --upgrade --target $(VENV)/oracles/zlab $$(grep '^dflash==' requirements-oracles.lock)
	$(PIP) --no-deps --upgrade --target $(VENV)/oracles/fla $$(grep -v '^dflash==\|^#' requirements-oracles.lock)
	@touch $@

clean:
	rm -rf $(VENV) results .snakemake
