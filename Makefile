PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo quick test slow exhaustive browser check docs gallery clean

# The release of torch that the tests run with; `pip install .` alone takes any from 2.9 on.
.venv/core: pyproject.toml setup.py $(wildcard src/outpace/*/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/test: .venv/core
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

.venv/dev: .venv/core
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/core
	$(BIN)/outpace race

# Units of what decodes, and every method together against alone. They need one process only.
QUICK := $(addprefix tests/,decoding methods pacing) \
	$(addprefix tests/engine/test_,cache.py engine.py feed.py orders.py runner.py) \
	tests/models/test_transformer.py tests/constraint/test_automaton.py \
	tests/engine/test_equivalence.py::test_scattered_pages_change_nothing
LONGER := $(addprefix tests/methods/test_,features.py naive.py options.py)

quick: .venv/test
	$(BIN)/python -m pytest -q -m "not slow and not exhaustive" $(LONGER:%=--ignore=%) $(QUICK)

# Each process runs torch on one thread.
TOGETHER := -n auto --maxprocesses 4 --dist worksteal

test: .venv/dev
	$(BIN)/python -m pytest -q $(TOGETHER) -m "not slow and not exhaustive and not browser"

# A release of OpenAI's client beside that of the development extra.
.venv/openai2: .venv/dev
	$(BIN)/pip install --quiet --target $@ 'openai>=2,<3'

slow: .venv/dev
	$(BIN)/python -m pytest -q $(TOGETHER) -m slow

exhaustive: .venv/dev .venv/openai2
	$(BIN)/python -m pytest -q $(TOGETHER) -m exhaustive

browser: .venv/dev
	$(BIN)/python -m pytest -q $(TOGETHER) -m browser $$(grep -rl 'mark\.browser' tests)

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/check_words.py

docs: .venv/dev
	$(BIN)/python docs/site.py

# The page's own commands draw its pictures.
gallery: .venv/dev
	grep '^outpace trace' docs/gallery.md | (cd docs/gallery; PATH="$(CURDIR)/$(BIN):$$PATH" sh -e)

clean:
	rm -rf .venv build
