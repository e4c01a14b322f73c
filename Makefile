# make run · make test: each builds the locked environment first. PYTHON=python3.11 make …: another interpreter.
PYTHON ?= python3
PLATFORM := $(if $(wildcard /proc/driver/nvidia/version),cuda,cpu)
BIN := .venv/bin
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -r envs/$(PLATFORM).txt
# Where pip finds wheels on this machine, which uv does not know by itself.
LINKS = $(shell $(BIN)/pip config get :env:.find-links 2>/dev/null || $(BIN)/pip config get global.find-links 2>/dev/null)
COMPILE := uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
	--no-annotate --no-header --overrides envs/overrides.txt

.PHONY: run test test-all env lock check clean

run: env
	$(BIN)/snakemake --cores all --resources gpu=8

test: env
	$(BIN)/python -m pytest tests/workflow tests -m "not long" -n 2 --dist loadfile --no-loadscope-reorder

test-all: env
	$(BIN)/python -m pytest tests

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint

env: .venv/installed-$(PLATFORM)

.venv/installed-%: envs/%.txt .venv/bin/uv
	$(if $(filter cpu,$*),UV_FIND_LINKS="$(LINKS)" $(UV) || $(UV) --torch-backend cpu,$(UV))
	touch $@

.venv/bin/uv: envs/uv-version
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet uv==$(shell cat envs/uv-version)

# Resolves envs/*.in into the locks. PyTorch's CPU build has no hash there: other Pythons' files are not in this machine's reach.
lock: .venv/bin/uv
	UV_FIND_LINKS="$(LINKS)" $(BIN)/$(COMPILE) envs/cpu.in -o envs/cpu.txt
	sed -i -e '/^torch==/,/^[a-z]/{/--hash/d}' -e '/^torch==/s/ .*//' envs/cpu.txt
	$(BIN)/$(COMPILE) envs/cuda.in -o envs/cuda.txt

clean:
	rm -rf .venv .snakemake results
