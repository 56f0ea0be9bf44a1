# Two commands do all the set-up: `make demo` and `make test`. See README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8000
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo test test-slow lint clean

install: $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/worldserve demo --port $(PORT)

test: $(VENV)/.test
	$(BIN)/python tests/support/run_tests.py

test-slow: $(VENV)/.test
	$(BIN)/python tests/support/run_tests.py --slow

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "worldserve needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing worldserve and PyTorch into $(VENV); the first time takes a few minutes."
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing worldserve, PyTorch and the test tools into $(VENV); the first time takes a few minutes."
	$(INSTALL) -e '.[demo,test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.lint: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[demo,test,lint]'
	@touch $@ $(VENV)/.demo $(VENV)/.test

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
