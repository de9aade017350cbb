SHELL := bash
.SHELLFLAGS := -eo pipefail -c
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo near test coverage nightly mutants wheels check docs gallery clean

# The release of torch that the tests run with; `pip install .` alone takes any from 2.9 on.
.venv/core: pyproject.toml $(wildcard src/outpace/*/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install --editable '.[gguf]'
	touch $@

.venv/dev: .venv/core
	$(BIN)/pip install --editable '.[dev]'
	touch $@

# Ray, the linker of wheels, and a release of OpenAI's client beside that of the development extra.
.venv/nightly: .venv/dev
	$(BIN)/pip install --editable '.[dev,ray]' 'ziglang>=0.15'
	$(BIN)/pip install --target .venv/openai2 'openai>=2,<3'
	touch $@

demo: .venv/core
	$(BIN)/outpace race

# Each process runs torch on one thread.
TESTS := $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

# Tests of the packages that differ from the commit SINCE, by default the last, and of those above.
near: .venv/dev
	$(BIN)/python tests/near.py $(SINCE) | xargs --no-run-if-empty $(TESTS)

COVERED := decoding methods engine attention constraint api server

test: .venv/dev
	$(TESTS)

# Counting lines takes half as long again as the tests.
coverage: .venv/dev
	$(TESTS) $(COVERED:%=--cov=src/outpace/%) --cov-report=
	@for package in $(COVERED); do \
	    total=$$($(BIN)/coverage report --include="src/outpace/$$package/*" --format=total); \
	    echo "$$package: $$total % of lines covered"; \
	    [ $$total -ge 93 ] || { echo "$$package: 93 % are required"; exit 1; }; \
	done

nightly: .venv/nightly
	$(TESTS) --nightly
	$(MAKE) coverage

mutants: .venv/dev
	$(BIN)/python tests/mutants.py

# GCC compiles, so that a wheel is as fast as an installation; zig links with the symbols of glibc 2.28.
wheels: .venv/nightly
	for processor in x86_64 aarch64; do \
	    export CC=$$processor-linux-gnu-gcc; \
	    LDSHARED="$(abspath $(BIN))/python -m ziglang cc -target $$processor-linux-gnu.2.28 -shared" \
	    LDFLAGS=$$($$CC -print-libgcc-file-name) $(BIN)/python -m build --no-isolation \
	        -C--build-option=--plat-name=manylinux_2_28_$$processor; \
	    $(BIN)/python -m zipfile -l dist/*-manylinux_2_28_$$processor.whl | grep _compiled.abi3.so; \
	done

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
