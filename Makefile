# Two commands on a fresh machine: `make demo` and `make test`. Everything goes through .venv, which either of them
# sets up. Only relative paths are used, so a folder with a space in its path works.

SHELL := /bin/bash
PYTHON ?= python3
UV_VERSION := 0.13.9
PY := .venv/bin/python
ARGS ?=

# pip's own settings say where else packages are; uv does not read them.
define PACKAGE_SOURCES
links="$${PIP_FIND_LINKS:-$$($(PY) -m pip config get global.find-links 2>/dev/null)}"; \
index="$${PIP_INDEX_URL:-$$($(PY) -m pip config get global.index-url 2>/dev/null)}"; \
if [ -n "$$links" ]; then export UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')"; fi; \
if [ -n "$$index" ]; then export UV_INDEX_URL="$$index"; fi; \
export UV_HTTP_TIMEOUT="$${PIP_DEFAULT_TIMEOUT:-120}"
endef

.PHONY: help setup demo up test lint format types unit constraints procfile clean

help:
	@echo "make demo   two real engines on this machine's CPU answer examples/support.jsonl"
	@echo "make test   lint, types, and every test"
	@echo "make up     keep it running (trunkline up)"
	@echo "make setup  only .venv"

setup: .venv/.ready

# torch: the CPU build, from a folder of wheels where one is configured, else from the index that --torch-backend knows.
.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv (once; a few minutes where packages download slowly)"
	@[ -x $(PY) ] || $(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(PACKAGE_SOURCES); \
	if [ -n "$$links" ]; then torch=(torch==2.13.0+cpu); else torch=(--torch-backend cpu); fi; \
	$(PY) -m uv pip install --quiet --python $(PY) --constraint constraints.txt --build-constraint constraints.txt \
		"$${torch[@]}" --editable '.[server,embedded,cpu,dev]'
	@touch .venv/.ready

demo: .venv/.ready
	@$(PY) -m trunkline demo $(ARGS)

up: .venv/.ready
	@$(PY) -m trunkline up $(ARGS)

test: lint types
	$(PY) -m pytest $(ARGS)

lint: .venv/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: .venv/.ready
	$(PY) -m mypy

format: .venv/.ready
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

unit: .venv/.ready
	$(PY) -m pytest tests/unit tests/test_layers.py $(ARGS)

procfile: .venv/.ready
	$(PY) -m service procfile > Procfile.new && mv Procfile.new Procfile

# What .venv holds now, as pins. Edit pyproject.toml, `make setup`, try it, then this.
constraints: .venv/.ready
	{ sed -n '/^#/p' constraints.txt; $(PY) -m uv pip freeze --python $(PY) \
		| grep -v -E '^(-e |pip==)' | sed 's/^torch==\([0-9.]*\)+cpu$$/torch==\1/'; } > constraints.new
	mv constraints.new constraints.txt && touch .venv/.ready

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist trunkline.egg-info
