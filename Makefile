# Newcomers need two of these: `make demo` and `make test`. Everything is made inside .venv.
PYTHON ?= python3
export PYTHON
RUN := .venv/bin/python -m

.DEFAULT_GOAL := help
.PHONY: help demo test setup check bench accept clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-8s %s\n", $$1, $$2 }'

demo: ## Install into .venv and run the main job: one scheduler step, padded and rewritten
	@scripts/setup.sh
	.venv/bin/ple-inductor replay

test: setup ## Install into .venv and run all tests
	$(RUN) pytest

setup: ## Install the package with its test and lint tools into .venv
	@scripts/setup.sh dev

check: setup ## Formatting, lint and types
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy

bench: setup ## Measure memory, time and growth, padded against rewritten
	.venv/bin/python benchmarks/cpu.py

accept: setup ## Rewrite the expected text of snapshot tests; read the diff before you commit it
	EXPECTTEST_ACCEPT=1 $(RUN) pytest -p no:xdist

clean: ## Remove all that these commands made
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
