# `make demo` and `make test` need Python 3.11 or newer with pip, and nothing else.
# Each Python takes an environment of its own: `make test PYTHON=python3.12 VENV=.venv312`.
PYTHON ?= python3
# One more than the cores of a small machine: some tests wait for processes and clocks.
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A worker takes the tests of a folder one after another, so most fixtures are made once.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test fast-tests test-all docs gallery package test-docs test-browser test-pods lint typecheck clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

# The two experiments of the first table, and those that `make demo FULL=1` adds.
DEMO := diloco_text,data_parallel_text
ifdef FULL
DEMO := diloco_text,streaming_diloco_text,data_parallel_text,single_island_text
endif

demo: $(INSTALLED)  ## Train DiLoCo and data parallelism, and compare them; FULL=1 adds two experiments.
	$(BIN)/fedpax compare --exp=$(DEMO) --job_log_dir=runs/demo

# The fast tests spend most of their time in the compiler. These options shorten it: XLA's simple
# fusion emitters, LLVM without its expensive passes, one LLVM module for each program in place of
# up to 32 that compile in parallel, and no stack traces in programs. `make test-all` compiles as
# users do. Bytecode is kept in any case: without it, each worker would rewrite the assertions of
# all tests again, and each process that a test starts would compile fedpax again. Compiled programs
# stay in .pytest_cache: the next `make test` loads those that have not changed.
HURRY := PYTHONDONTWRITEBYTECODE= \
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS=0 \
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters \
	--xla_cpu_parallel_codegen_split_count=1"

# mypy runs on one core, so it runs beside the tests.
test: lint  ## Lint, check types and run the fast tests.
	@$(MAKE) --no-print-directory -j 2 typecheck fast-tests

fast-tests: $(INSTALLED)
	$(HURRY) $(PYTEST) -m "not slow"

test-all: lint typecheck  ## The same with the slow tests.
	$(PYTEST)

docs: $(INSTALLED)  ## Build the documentation site, build/site/index.html, with warnings as errors.
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/site

gallery: $(INSTALLED)  ## Train all methods on two problems, and draw the figures of the gallery of methods.
	$(HURRY) $(BIN)/python -m fedpax.experiments.benchmarks.gallery --json=docs/gallery/results.json
	$(BIN)/python docs/gallery_pages.py

test-docs: $(INSTALLED)  ## Build the site, and run the examples of all pages and docstrings, the slow ones too.
	$(HURRY) $(PYTEST) tests/test_docs.py tests/test_site.py tests/test_gallery.py tests/test_notebooks.py

# Chromium is the system's: Debian's package chromium.
test-browser: docs  ## Build the site, and read it in Chromium: widths, search, dark mode, errors.
	$(BIN)/pip install --quiet --target build/browser playwright
	SITE=build/site PYTHONPATH=build/browser $(BIN)/pytest tests/test_site_in_browser.py

# libtpu compiles for topologies: no TPU is needed. It stays outside of the environment, where the
# fast tests would use it. The largest models take hours of CPU time.
test-pods: $(INSTALLED)  ## Compile for TPU pods, and check overlap and the program of one island.
	$(BIN)/pip install --quiet --no-deps --target build/tpu --constraint constraints.txt libtpu
	PYTHONPATH=build/tpu $(PYTEST) tests/algorithms/test_streaming_overlap.py \
		tests/experiments/test_streaming_overlap_at_scale.py \
		tests/algorithms/test_one_island.py::test_on_tpu_pods \
		tests/algorithms/test_one_island.py::test_a_mapped_step_of_donated_state_on_a_tpu_pod

lint: $(INSTALLED)  ## Run ruff, and check the format of code and pages.
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 fedpax algorithms experiments  # encodings are named
	$(BIN)/ruff format --check .

# Check the types of the wheel, since users import the installed package. mypy treats a folder on
# PYTHONPATH as installed: without py.typed it would find no types there. The benchmarks are not in the
# wheel, and their types are checked beside it.
typecheck: $(INSTALLED)  ## Run mypy on the installed package.
	@rm -rf build
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/installed .
	@cp -r experiments/benchmarks build/installed/fedpax/experiments/
	cd build && PYTHONPATH=installed ../$(BIN)/mypy --config-file=../pyproject.toml --cache-dir=../.mypy_cache -p fedpax

# The machine's own pip fills the environment: Python needs no ensurepip.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("fedpax needs Python 3.11 or \
	newer, and $(PYTHON) is " + sys.version.split()[0] + ": try `make PYTHON=python3.11 ...`")'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --constraint constraints.txt pip --editable ".[dev]"
	@touch $@

# The tools stay outside of the environment, as libtpu does.
package: $(INSTALLED)  ## Build the wheel and the source distribution, and check their metadata.
	@rm -rf dist
	$(BIN)/pip install --quiet --target build/tools build twine
	PYTHONPATH=build/tools $(BIN)/python -m build --no-isolation --outdir dist .
	PYTHONPATH=build/tools $(BIN)/python -m twine check --strict dist/*

clean:  ## Remove the environment and all caches; keep the results in runs/.
	rm -rf $(VENV) build dist .src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
