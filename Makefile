# Each target does its own set-up on a fresh machine: a virtual environment in .venv, packages from the registry that
# pip is configured with, nothing that needs root. `make demo` and `make test` are the two to know.

PY := .venv/bin/python

.PHONY: bench-page man docs screens exactness models help demo test soak reliability lint bench bench-quick setup clean

help:
	@echo "make demo    a coding-review conversation on a real model: disabled, first write, repeat, restart"
	@echo "make test    every test but the long ones, and lint"
	@echo "make soak    the long tests: more than an hour"
	@echo "make reliability  what make test and make soak counted, into docs/reliability.md"
	@echo "make lint    ruff and mypy"
	@echo "make bench   every benchmark against the limit of this machine; BENCH='restore --help' for one of them"
	@echo "make bench-quick  the core of them in less than five minutes: build/bench/quick.json"
	@echo "make bench-page  docs/benchmarks.md anew from the raw values in docs/bench"
	@echo "make exactness  how much the pieces of a prefill matter on this machine: docs/exactness.md"
	@echo "make models  every model family of mlx-lm, tiny, restored and compared: docs/models.md; MODELS=llama for one"
	@echo "make screens  the pictures of docs/screens.md"
	@echo "make docs    the documentation site: build/site/index.html"
	@echo "make man     docs/man/kvstore.1 and the table of cache flags anew from the command line"
	@echo "make clean   remove .venv and build"

setup: .venv/.ready

.venv/.ready: pyproject.toml tools/setup_venv.sh
	@echo "Setting up .venv (once)"
	@tools/setup_venv.sh

demo: .venv/.ready
	$(PY) tools/demo.py $(DEMO)

# Two files of tests at a time; a file's own stay together, for what they share. PYTEST='-n 0' has them one by one.
PYTEST ?= -n 2 --dist loadfile

# With the documentation's packages (130 MB, 14 s), so that the site is built in the tests too.
test: lint .venv/.docs
	KVSTORE_RECORD="$${KVSTORE_RECORD:-build/reliability}" LD_PRELOAD="$$($(PY) tools/fast_blas.py)" $(PY) -m pytest -m "not soak" $(PYTEST) $(TESTS)

soak: .venv/.ready
	KVSTORE_RECORD="$${KVSTORE_RECORD:-build/reliability}" LD_PRELOAD="$$($(PY) tools/fast_blas.py)" $(PY) -m pytest -m soak $(TESTS)

reliability: .venv/.ready
	$(PY) tools/reliability_table.py --write

lint: .venv/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: .venv/.ready
	$(PY) tools/bench.py $(BENCH)

bench-quick: .venv/.ready
	$(PY) tools/bench.py quick

bench-page: .venv/.ready
	$(PY) tools/benchmarks_page.py

exactness: .venv/.ready
	LD_PRELOAD="$$($(PY) tools/fast_blas.py)" $(PY) tools/exactness.py --page docs/exactness.md
	LD_PRELOAD= $(PY) tools/exactness.py --page docs/exactness.md

models: .venv/.ready
	LD_PRELOAD="$$($(PY) tools/fast_blas.py)" $(PY) tools/models.py $(MODELS)

.venv/.docs: .venv/.ready pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

# The variable silences a notice that the theme is maintained until May 2027 only (pyproject.toml says so, too).
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

man: .venv/.ready
	$(PY) tools/man_page.py

screens: .venv/.ready
	$(PY) tools/screens.py

clean:
	rm -rf .venv build
