PYTHON ?= python3
TESTS ?= tests
PYTEST_ARGS ?=
BENCH_ARGS ?=
SHAKE_ARGS ?=
FAULTS_ARGS ?=
WORLD_ARGS ?=
STORE ?= moto
SLURM_ARGS ?=
DOCS_ARGS ?=
TORCH := torch==2.13.0
AZURITE := azurite@3.37.0

BIN := .venv/bin
FULL := .venv/.installed-full
LIGHT := .venv/.installed-light
TORCH_BIN := .venv-torch/bin
TORCH_READY := .venv-torch/.installed
TRANSFORMERS_READY := .venv-torch/.installed-transformers
WORLD_BIN := .venv-world/bin
WORLD_READY := .venv-world/.installed
NEWEST_BIN := .venv-world-newest/bin
NEWEST_PYTHON ?= $(PYTHON)
DOCS_BIN := .venv-docs/bin
DOCS_READY := .venv-docs/.installed
PIP_INSTALL := -m pip install -qq --disable-pip-version-check -c constraints.txt

# The node that came with pip is used, and pyright does not go looking for newer versions of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help venv demo test coverage faults quick buckets check format bench docs torch azurite browser soak shake world newest slurm clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(FULL) ## set up .venv with every extra and the development tools

$(FULL): pyproject.toml constraints.txt
	@echo "Setting up .venv (all extras and development tools)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP_INSTALL) -e '.[all,dev]'
	@touch $(LIGHT) $@

# Just the core, for those who only want to look. A full install covers it.
$(LIGHT): pyproject.toml constraints.txt
	@echo "Setting up .venv (the core)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP_INSTALL) -e .
	@touch $@

demo: $(LIGHT) ## a short tour, on this machine's CPU
	@$(BIN)/python examples/demo.py

test: $(FULL) torch ## the test suite (TESTS=tests/layout, PYTEST_ARGS=-x)
	@$(BIN)/python -m pytest -n 4 --dist worksteal $(PYTEST_ARGS) $(TESTS)

# Which branches the suite reaches, by folder. `make faults` reads the data.
coverage: $(FULL) torch ## the test suite, and the share of branches that it reaches in each folder
	@rm -f .coverage .coverage.*
	@$(BIN)/python -m coverage run -m pytest -n 4 --dist worksteal --junitxml .covered.xml \
	  $(PYTEST_ARGS) $(TESTS)
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage json -q -o .covered.json
	@$(BIN)/python tests/support/covered.py .covered.json

# Needs the data of `make coverage`. Nine in ten faults take seconds, the others a minute.
faults: $(FULL) ## plant faults in the package, and see whether the tests notice (FAULTS_ARGS=--area boxes)
	@$(BIN)/python tests/support/planted.py $(FAULTS_ARGS)

# The folders that need no store, no device and no process.
quick: $(FULL) ## the tests of the pure folders, in seconds
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal $(PYTEST_ARGS) tests/common tests/tree tests/layout

buckets: $(FULL) ## all tests in buckets, which the suite has on disk (STORE=google)
	@OSTRAKA_TEST_STORE=$(STORE) $(BIN)/python -m pytest -n 2 --dist worksteal \
	  -k "bucket or seaweed or azurite or google" -m "not soak" $(PYTEST_ARGS) $(TESTS)

# Each test may take an hour, and runs alone: soak tests kill processes and fill disks. The figures
# end in bench/results, and in the documents that quote them.
soak: $(FULL) ## the long tests: kills, faults, many rounds; one table of what was counted
	@OSTRAKA_NEW_EXAMPLES=1 OSTRAKA_FIGURES=bench/results/soak.json \
	  $(BIN)/python -m pytest -m soak $(TESTS) -n 0 --timeout 3600 $(PYTEST_ARGS); \
	  status=$$?; $(BIN)/python tests/support/figures.py && exit $$status

# A test that fails here is right only if nobody is late.
shake: $(FULL) ## the test suite, its processes stopped for moments at random (SHAKE_ARGS=--seed 1)
	@$(BIN)/python tests/support/shake.py $(SHAKE_ARGS) -- \
	  $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS) $(TESTS)

# Others' packages live in an environment of their own: some want other versions than our tools do.
world: $(WORLD_READY) ## others' models and optimizers through the full cycle (WORLD_ARGS=--write-docs)
	@$(WORLD_BIN)/python -m world $(WORLD_ARGS)

$(WORLD_READY): pyproject.toml world/packages.txt world/constraints.txt
	@echo "Setting up .venv-world (the packages of world/packages.txt)"
	@test -x $(WORLD_BIN)/python || $(PYTHON) -m venv .venv-world
	@$(WORLD_BIN)/python -m pip install -qq --disable-pip-version-check \
	  -c world/constraints.txt -r world/packages.txt -e '.[flax]'
	@touch $@

# Set up anew each time, as there may be newer ones. NEWEST_PYTHON: the newest JAX may need it.
newest: ## `make world` with the newest JAX and Flax that install (NEWEST_PYTHON=python3.13)
	@echo "Setting up .venv-world-newest"
	@$(NEWEST_PYTHON) -m venv --clear .venv-world-newest
	@$(NEWEST_BIN)/python -m pip install -qq --disable-pip-version-check jax flax
	@$(NEWEST_BIN)/python -m pip freeze | grep -E '^(jax|jaxlib|flax)==' > .venv-world-newest/held.txt
	@$(NEWEST_BIN)/python -m pip install -qq --disable-pip-version-check \
	  -c .venv-world-newest/held.txt -r world/packages.txt -e '.[flax]'
	@$(NEWEST_BIN)/python -m world $(WORLD_ARGS)

check: $(FULL) ## ruff, formatting, pyright
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/pyright || failed=1; \
	exit $$failed

format: $(FULL) ## format the code and sort its imports
	@$(BIN)/ruff check --select I --fix --quiet .
	@$(BIN)/ruff format .

bench: $(FULL) torch ## compare with Orbax and PyTorch (BENCH_ARGS=...)
	@$(BIN)/python -m bench $(BENCH_ARGS)

# The tools of the site read the package without importing it: no JAX, and an environment of their own.
docs: $(DOCS_READY) ## the manual as a site in site/, checked in the files and in a browser
	@NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict
	@$(DOCS_BIN)/python docs/_site/check.py $(DOCS_ARGS) site
	@echo "To read it: python3 -m http.server --bind 127.0.0.1 --directory site"

$(DOCS_READY): pyproject.toml constraints.txt
	@echo "Setting up .venv-docs (the tools of the manual's site)"
	@test -x $(DOCS_BIN)/python || $(PYTHON) -m venv .venv-docs
	@$(DOCS_BIN)/python $(PIP_INSTALL) $$($(DOCS_BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

# PyTorch lives in an environment of its own, with transformers. Without it the benchmark still runs,
# and says so; without transformers its tests are skipped, and say so.
torch:
	@test -e $(TORCH_READY) || { \
	  echo "Setting up .venv-torch ($(TORCH))"; \
	  { test -x $(TORCH_BIN)/python || $(PYTHON) -m venv .venv-torch; } \
	  && $(TORCH_BIN)/python $(PIP_INSTALL) $(TORCH) numpy safetensors \
	  && touch $(TORCH_READY); \
	} || echo "*** $(TORCH) COULD NOT BE INSTALLED: THE PYTORCH ROWS ARE SKIPPED ***" >&2
	@test ! -e $(TORCH_READY) || test -e $(TRANSFORMERS_READY) || { \
	  echo "Setting up .venv-torch (transformers)"; \
	  $(TORCH_BIN)/python $(PIP_INSTALL) $(TORCH) transformers && touch $(TRANSFORMERS_READY); \
	} || echo "*** transformers COULD NOT BE INSTALLED: ITS TESTS ARE SKIPPED ***" >&2

# An emulator of Azure's store, for the tests: without it they are skipped, and say so.
azurite: ## install Azurite with npm, for the tests on Azure's store
	@npm install --prefix .azurite --no-package-lock --no-audit --no-fund --loglevel=error \
	  $(AZURITE)

# Debian's browser, for the tests of pages: without it they are skipped, and say so.
browser: ## install Debian's chromium and chromium-driver, for the tests of pages (needs root)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; \
	} || echo "*** chromium COULD NOT BE INSTALLED: THE TESTS OF PAGES ARE SKIPPED ***" >&2

# It installs nothing: it says what is missing. Slurm's daemons end with it.
slurm: $(FULL) ## examples/slurm on a real Slurm of one node; needs slurm-wlm and munge (SLURM_ARGS=--keep)
	@$(BIN)/python tests/slurm/drive.py $(SLURM_ARGS)

clean: ## remove caches, builds and scratch (environments stay)
	@rm -rf build dist site .pytest_cache .ruff_cache .hypothesis bench/scratch
	@find src tests bench examples world -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
