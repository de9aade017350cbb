PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow exhaustive browser check docs gallery clean

# The release of torch that the tests run with; `pip install .` alone takes any from 2.9 on.
.venv/core: pyproject.toml $(wildcard src/outpace/*/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/dev: .venv/core
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/core
	$(BIN)/outpace race

# Each process runs torch on one thread.
TOGETHER := -n auto --maxprocesses 4 --dist worksteal

test: .venv/dev
	$(BIN)/python -m pytest -q $(TOGETHER) -m "not slow and not exhaustive and not browser"

# A release of OpenAI's client beside that of the development extra.
.venv/openai2: .venv/dev
	$(BIN)/pip install --quiet --target $@ 'openai>=2,<3'

slow: .venv/dev .venv/openai2
	$(BIN)/python -m pytest -q $(TOGETHER) -m slow

exhaustive: .venv/dev
	$(BIN)/python -m pytest -q $(TOGETHER) -m exhaustive

browser: .venv/dev
	$(BIN)/python -m pytest -q -m browser

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/dev
	$(BIN)/python docs/site.py

# The page's own commands draw its pictures.
gallery: .venv/dev
	grep '^outpace trace' docs/gallery.md | (cd docs/gallery; PATH="$(CURDIR)/$(BIN):$$PATH" sh -e)

clean:
	rm -rf .venv build
