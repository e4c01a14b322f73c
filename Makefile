# make run · make test: each builds the locked environment first. PYTHON=python3.11 make …: another interpreter.
PYTHON ?= python3
PLATFORM := $(if $(wildcard /proc/driver/nvidia/version),cuda,cpu)
BIN := .venv/bin
# What is installed is known by the content of these files, not by their times, which a checkout changes. make clean starts anew.
UV_READY := .venv/uv-$(shell cat envs/uv-version)
INSTALLED := .venv/installed-$(PLATFORM)-$(shell sha256sum envs/$(PLATFORM).txt | cut -c 1-16)
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -r envs/$(PLATFORM).txt
# Where pip finds wheels on this machine, which uv does not know by itself.
LINKS = $(shell $(BIN)/pip config get :env:.find-links 2>/dev/null || $(BIN)/pip config get global.find-links 2>/dev/null)
COMPILE := uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
	--no-annotate --no-header --overrides envs/overrides.txt

.PHONY: run test test-all test-slurm test-engines env lock check clean

run: env
	$(BIN)/snakemake --cores all --resources gpu=8

test: env
	$(BIN)/python -m pytest tests/workflow tests -m "not long" -n 2 --dist loadfile --no-loadscope-reorder

test-all: env
	$(BIN)/python -m pytest tests

# Only where Slurm is missing is it installed (Debian, as root); the test configures, starts and stops it. About a quarter of an hour.
test-slurm: env
	command -v slurmctld munged >/dev/null || (apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge)
	$(BIN)/python -m pytest tests/cluster/test_slurm.py

# The tests that drive vLLM, against each of these releases in an environment of its own (.venv-engines, 4 GB each if not hard-linked).
VLLM ?= 0.30.0 0.31.0 0.32.0
test-engines: env
	UV_FIND_LINKS="$(LINKS)" $(BIN)/python tests/engine_matrix.py $(VLLM)

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint

env: $(INSTALLED)

$(INSTALLED): $(UV_READY)
	rm -f .venv/installed-*
	$(if $(filter cpu,$(PLATFORM)),UV_FIND_LINKS="$(LINKS)" $(UV) || $(UV) --torch-backend cpu,$(UV))
	touch $@

$(UV_READY):
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	rm -f .venv/uv-*
	$(BIN)/pip install --quiet uv==$(shell cat envs/uv-version)
	touch $@

# Resolves envs/*.in into the locks. PyTorch's CPU build has no hash there: other Pythons' files are not in this machine's reach.
lock: $(UV_READY)
	UV_FIND_LINKS="$(LINKS)" $(BIN)/$(COMPILE) envs/cpu.in -o envs/cpu.txt
	sed -i -e '/^torch==/,/^[a-z]/{/--hash/d}' -e '/^torch==/s/ .*//' envs/cpu.txt
	$(BIN)/$(COMPILE) envs/cuda.in -o envs/cuda.txt
	for lock in cpu cuda; do sed -i "3s/.*/# $$(sha256sum envs/$$lock.txt | cut -c 1-64)/" envs/$$lock.yaml; done

clean:
	rm -rf .venv .venv-engines .snakemake results
