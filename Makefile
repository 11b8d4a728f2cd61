# Every recipe does its own set-up: .venv, and llama.cpp compiled for this machine (once; see scripts/toolchain.py).
# macOS, Linux and WSL; needs make, Python 3.10+ and a C++ compiler. Works with the make of macOS (3.81).

.DEFAULT_GOAL := help
.PHONY: help run test quick lint format setup wheel clean

VENV   := .venv
BIN    := $(VENV)/bin
# The Python to use; once .venv stands, its own. `make run PYTHON=python3.12` chooses another.
PYTHON ?= $(shell test -x $(BIN)/python && echo $(BIN)/python || echo python3)
# Without compiled modules each start of the program compiles all of them: 0.3 s, some hundred times in the tests.
unexport PYTHONDONTWRITEBYTECODE
NO_PYTHON = { echo "specllama: $(PYTHON) was not found; install Python 3.10 or newer" >&2; exit 1; }
# -S: without site-packages, which it does not need, it starts faster.
SETUP   = @command -v $(PYTHON) >/dev/null || $(NO_PYTHON); $(PYTHON) -S scripts/bootstrap.py
# What the tests on real models read; the second and third are the default pair.
MODELS := SmolLM2-135M-Instruct.Q4_1 qwen2.5-coder-0.5b-instruct-q4_k_m qwen2.5-coder-1.5b-instruct-q4_k_m \
          gemma-3-270m-q4_k_m

# The prompt goes through the environment, untouched by make and the shell, whatever it holds.
PROMPT := Write a Python function that merges two sorted lists.
export SPECLLAMA_MAKE_PROMPT := $(value PROMPT)
unexport PROMPT
ARGS   :=

help:
	@echo 'make run PROMPT="..."   answer a prompt (ARGS="--temp 0 ..." passes options on)'
	@echo 'make test               lint and every test, those on real models included (fetches 2 GB once)'
	@echo 'make quick              the tests that need no model and start no programs: under a minute'
	@echo 'make lint               ruff and mypy; make format mends what can be mended'
	@echo 'make setup              only .venv, for working on specllama: .venv/bin/specllama'
	@echo 'make wheel              only llama.cpp compiled for this machine; prints the folder of the wheel'
	@echo 'make clean              remove .venv and caches of this folder (compiled wheels and models stay)'
	@echo
	@echo 'PYTHON=python3.12 chooses a Python, SPECLLAMA_CPU=1 builds without CUDA, CMAKE_ARGS adds build options.'

# The prompt is PROMPT alone: reading a pipe that stays open would never end. `specllama run` reads stdin.
run:
	$(SETUP)
	@test -t 0 || exec </dev/null; exec $(BIN)/specllama run $(ARGS) -- "$$SPECLLAMA_MAKE_PROMPT"

test: lint
	@$(BIN)/specllama models pull $(MODELS)
	@$(BIN)/pytest -n auto --dist worksteal -m "not model"
	@SPECLLAMA_REQUIRE_MODELS=1 $(BIN)/pytest -n auto --dist worksteal tests/real

quick:
	$(SETUP) --dev
	@$(BIN)/pytest -n auto --dist worksteal -m "not model and not slow"

lint:
	$(SETUP) --dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format:
	$(SETUP) --dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

setup:
	$(SETUP) --dev

wheel:
	$(SETUP) --wheel

clean:
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
