# Needs a Python (>=3.11,<3.14) with its venv module, and make. Everything else is installed into
# environments inside this folder.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:

# A Python that is not named is the first of these that runs and is of a supported version.
PYTHON ?=
PYTHON_NEWEST ?=
PYTHONS := python3.11 python3.12 python3.13 python3
NEWEST_PYTHONS := python3.13 python3.12

ARGS ?=
PYTEST_ARGS ?=
PIP := -m pip --quiet --disable-pip-version-check
# A process that dies ends the run: pytest-xdist may wait forever for the tests of one it replaces.
PYTEST := -m pytest -n 2 --dist loadfile --max-worker-restart 0 $(PYTEST_ARGS)

VENV := .venv
NEWEST := .venv-newest
PYTHON_IS_SUPPORTED := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))

# $(call create_environment,folder,name of the variable that chose a Python,its value,candidates)
# A version manager's shim can be on the path and yet fail, so each candidate is run. A folder
# without the stamp holds an interrupted install, perhaps half a package, and is made anew.
define create_environment
if ! { [ -e $(1)/.complete ] && $(1)/bin/python -m pip --version >/dev/null 2>&1; }; then \
	for python in $(if $(strip $(3)),"$(3)",$(4)) ""; do \
		if [ -z "$$python" ]; then break; fi; \
		if "$$python" -c '$(PYTHON_IS_SUPPORTED)' >/dev/null 2>&1; then break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "No usable Python among: $(if $(strip $(3)),$(3),$(4)). It must run, be >=3.11,<3.14 and have venv and ensurepip; name one with $(2)=/path/to/python." >&2; \
		exit 1; \
	fi; \
	echo "Creating $(1) with $$("$$python" --version)."; \
	"$$python" -m venv --clear $(1) || exit 1; \
fi; \
rm -f $(1)/.complete $(1)/.dev $(1)/.docs
endef

# A comma in an argument of a call would end it.
, := ,

# $(call install_pinned,requirement)
# Setuptools is installed first and used as it is: pip would fetch an unpinned one for the build.
define install_pinned
@$(call create_environment,$(VENV),PYTHON,$(PYTHON),$(PYTHONS))
@echo "Installing the pinned packages into $(VENV); this takes 1 to 5 minutes, once."
@$(VENV)/bin/python $(PIP) install --constraint constraints.txt setuptools
@$(VENV)/bin/python $(PIP) install --constraint constraints.txt --no-build-isolation --editable '$(1)'
endef

.PHONY: help
help:
	@echo "make train        train; ARGS='...' are the overrides of python -m experiments.train"
	@echo "make test         lint and types, then run the tests; PYTEST_ARGS='...' (or ARGS) go to pytest"
	@echo "make test-newest  run the tests with the newest releases and the newest Python"
	@echo "make lint         check style, formatting and the direction of imports"
	@echo "make types        check the types of everything but the tests"
	@echo "make format       format, and fix what can be fixed"
	@echo "make docs         build the pages of docs/ as a site in site/"
	@echo "make clean        remove the environments, builds and caches; runs/ stays"
	@echo "PYTHON=/path/to/python chooses the Python that .venv is made with, PYTHON_NEWEST= that of test-newest."

# A stamp is written only when everything before it succeeded. The dev install holds all that
# training needs, so it writes both.
$(VENV)/.complete: pyproject.toml constraints.txt
	$(call install_pinned,.)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install_pinned,.[dev])
	@touch $(VENV)/.complete $@

$(VENV)/.docs: pyproject.toml constraints.txt
	$(call install_pinned,.[dev$(,)docs])
	@touch $(VENV)/.complete $(VENV)/.dev $@

.PHONY: train
train: $(VENV)/.complete
	@$(VENV)/bin/python -m experiments.train $(ARGS)

.PHONY: lint
lint: $(VENV)/.dev
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check .
	@$(VENV)/bin/lint-imports --no-cache --no-logo

.PHONY: types
types: $(VENV)/.dev
	@$(VENV)/bin/python -m mypy

.PHONY: format
format: $(VENV)/.dev
	@$(VENV)/bin/python -m ruff check --fix .
	@$(VENV)/bin/python -m ruff format .

.PHONY: test
test: lint types
	@$(VENV)/bin/python $(PYTEST) $(ARGS)

# The pages that are made of the code first; a warning is an error.
.PHONY: docs
docs: $(VENV)/.docs
	@$(VENV)/bin/python docs/reference.py
	@$(VENV)/bin/python docs/figures/draw.py
	@$(VENV)/bin/python -m mkdocs --quiet build --strict
	@echo "See site/index.html."

# No constraints, and asked for at each call: what is newest changes from day to day.
.PHONY: test-newest
test-newest:
	@$(call create_environment,$(NEWEST),PYTHON_NEWEST,$(PYTHON_NEWEST),$(NEWEST_PYTHONS))
	@echo "Installing the newest packages into $(NEWEST); this takes 1 to 5 minutes the first time."
	@$(NEWEST)/bin/python $(PIP) install --upgrade --upgrade-strategy eager --editable '.[dev]'
	@touch $(NEWEST)/.complete
	@echo "Testing with $$($(NEWEST)/bin/python --version) and the newest packages."
	@$(NEWEST)/bin/python $(PYTEST) $(ARGS)

.PHONY: clean
clean:
	@rm -rf $(VENV) $(NEWEST) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.git -prune -o -path ./runs -prune -o -type d -name __pycache__ -exec rm -rf {} +
