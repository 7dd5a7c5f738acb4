# make demo   sets up and runs the main job on data every machine has
# make test   sets up and runs the tests
# make check  sets up and runs the linters, the type checker and the check of imports
# make docs   sets up and builds the documentation in .cache/site
# make bench  sets up and runs the benchmarks (half an hour on two idle cores)

VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python

.PHONY: setup demo test check format docs bench clean
setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(RUN) -m examples.demo

# One thread per worker: several workers with several threads each would wait for one another.
test: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist worksteal

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: setup
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

bench: setup
	$(RUN) -m benchmarks.adapter
	$(RUN) -m benchmarks.dispatch

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache
