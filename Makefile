# The verbs of this repository; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := tandem kv_transfer prefill_worker decode_worker router launcher
PROMPT ?= What is the capital of France?
ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all check fmt check-fmt lint types imports proto check-proto \
	schema check-schema bench clean

help: ## List the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## Virtual environment in .venv with the tested set of dependencies
	@:

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "$(PYTHON) is missing or older than 3.11: install Python 3.11 or newer, or run make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Setting up $(VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --constraint constraints.txt torch==2.13.0 \
		|| { echo "Installing PyTorch failed, see above: check the network and free disk space, then run make again"; exit 1; }
	@$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]' \
		|| { echo "Installing dependencies failed, see above: check the network and free disk space, then run make again"; exit 1; }
	@touch $@

run: setup ## Serve the demo model, answer PROMPT, go on until Ctrl-C (ONCE=1: exit after the answer)
	@$(BIN)/tandem serve $(ARGS) $(if $(ONCE),--once,--first) '$(subst ','\'',$(PROMPT))'

test: setup ## The tests, but for those that take minutes
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: setup ## All tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: check-fmt lint types imports check-proto check-schema test ## What CI runs

fmt: setup ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only --quiet .

check-fmt: setup
	@$(BIN)/ruff format --check .

lint: setup ## Style and likely mistakes
	@$(BIN)/ruff check .

types: setup ## Static types
	@$(BIN)/mypy

imports: setup ## Imports go down only
	@$(BIN)/lint-imports

# $(1): the folder to generate into
protoc = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) \
	--pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=$(1) proto/tandem/pb/*.proto

proto: setup ## Generate tandem/pb from proto/
	@$(call protoc,.)

check-proto: setup ## tandem/pb is what proto/ gives
	@fresh=$$(mktemp -d) && trap 'rm -r "$$fresh"' EXIT && $(call protoc,"$$fresh") \
		&& diff -r -q -x __init__.py -x __pycache__ "$$fresh/tandem/pb" tandem/pb \
		|| { echo "tandem/pb is stale: run make proto and commit the result"; exit 1; }

schema: setup ## Generate docs/config.schema.json and docs/configuration.md
	@$(BIN)/tandem config schema > docs/config.schema.json
	@$(BIN)/tandem config schema --markdown > docs/configuration.md

check-schema: setup ## Both are what the configuration tree gives
	@$(BIN)/tandem config schema | diff -q - docs/config.schema.json \
		&& $(BIN)/tandem config schema --markdown | diff -q - docs/configuration.md \
		|| { echo "docs of the configuration are stale: run make schema and commit the result"; exit 1; }

bench: setup ## Measure the demo model, or a server with ARGS=; see benchmarks/README.md
	@$(BIN)/python -m benchmarks.serve $(ARGS)

clean: ## Remove the virtual environment and what tools left behind
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
