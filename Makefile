# Needs Python 3.12 or later, pip and make. Everything is installed into .venv, once per change of pyproject.toml.

VENV := .venv
PY := $(VENV)/bin/python
CHECK := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))

# The newest Python that is new enough and can make environments; looked for when .venv is made, and only then.
PYTHON ?= $(shell for python in python3.14 python3.13 python3.12 python3 python; do \
	$$python -c '$(CHECK)' 2>/dev/null && { echo $$python; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help demo test test-compilers lint docs clean
.DELETE_ON_ERROR:

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1  /p' Makefile

demo: $(VENV)/installed-base ## a small real model answers a question
	$(PY) -m jaxvllm demo

# Two workers with half of the tests each, in order, so that a module's fixtures are mostly made once.
test: $(VENV)/installed-test ## the tests that take seconds
	$(PY) -m pytest -m "not slow" -n 2 --dist worksteal

# Apart from .venv: with a plugin for accelerators installed, JAX would look for them everywhere else. The CUDA
# toolkit of the machine does where there is one; else its wheels are fetched, some gigabytes of them.
COMPILERS := .venv-compilers
CUDA := $(if $(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/bin/ptxas),cuda13-local,cuda13)

test-compilers: $(COMPILERS)/installed ## the kernels through the TPU's and the GPU's compilers, no device needed
	JAX_PLATFORMS=cpu $(COMPILERS)/bin/python -m pytest -n 2 --dist worksteal \
		tests/test_tpu_compile.py tests/test_gpu_compile.py tests/test_compile.py

$(COMPILERS)/installed: pyproject.toml | $(VENV)/created
	@echo "Installing libtpu and the CUDA plugin into $(COMPILERS)"
	@$(PY) -m venv --clear $(COMPILERS)
	@$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[test,tpu]' 'jax[$(CUDA)]>=0.11.2,<0.13'
	@touch $@

lint: $(VENV)/installed-dev ## style, formatting and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(PY)

docs: $(VENV)/installed-docs ## the documentation site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(COMPILERS) dist build site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# An environment that works is kept, however it was made.
$(VENV)/created:
	@$(PY) -c '$(CHECK)' 2>/dev/null && $(PY) -m pip --version >/dev/null 2>&1 || { \
		test -n "$(PYTHON)" || { \
			echo "No Python 3.12 or later with venv and pip was found: install one, or run make PYTHON=/path/to/python." >&2; \
			exit 1; }; \
		echo "Making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); }
	@touch $@

$(VENV)/installed-base: INSTALL := .
$(VENV)/installed-test: INSTALL := .[test]
$(VENV)/installed-dev: INSTALL := .[dev]
$(VENV)/installed-docs: INSTALL := .[docs]
$(VENV)/installed-base $(VENV)/installed-test $(VENV)/installed-dev $(VENV)/installed-docs: pyproject.toml | $(VENV)/created
	@echo "Installing jaxvllm$(INSTALL:.%=%) and what it needs into $(VENV); the first time takes a minute or two"
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '$(INSTALL)'
	@touch $@
