# The commands of this workspace; `make help` lists them. All set-up is local: uv in .uv/, the locked packages in .venv/.

UV_VERSION := 0.13.9
PYTHON ?= python3
SGLANG_PYTHON ?= python3.11
JOBS ?= 2
RECIPE ?= recipes/quickstart.yaml

export UV := $(CURDIR)/.uv/bin/uv
# The interpreter that made .uv is the one for .venv, whatever else is active or installed.
export UV_PYTHON := $(CURDIR)/.uv/bin/python
export UV_PYTHON_DOWNLOADS := never
unexport VIRTUAL_ENV UV_PROJECT_ENVIRONMENT

# One core a process: tests start several ranks at once. Compiled kernels are kept between runs; no test may reach a hub.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.cache/inductor TRITON_CACHE_DIR=$(CURDIR)/.cache/triton

SGLANG_TESTS := packages/specforge-capture/tests/sglang tests/test_sglang_colocated.py tests/test_sglang_disaggregated.py \
	tests/test_sglang_export.py

UV_READY := .uv/.ready-$(UV_VERSION)
VENV_READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-sglang test-speculators lint types format lock check-lock pants wheels patches clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

setup: $(VENV_READY) ## Install uv and the locked workspace

quickstart: setup ## Train a draft model for a tiny target, and measure it
	.venv/bin/specforge-launch run $(RECIPE)

test: setup ## Run the whole test suite
	$(TEST_ENV) .venv/bin/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder --durations 15 $(PYTEST_ARGS)

test-sglang: setup ## Test the sglang target: real SGLang on the CPU, in an environment of its own
	$(SGLANG_PYTHON) scripts/sglang_cpu/install.py
	.uv/bin/python scripts/sglang_sources.py
	$(TEST_ENV) .venv/bin/python -m pytest -n $(JOBS) --dist loadscope $(SGLANG_TESTS) $(PYTEST_ARGS)

test-speculators: setup ## Test that speculators loads exported drafts: its wheel, beside the environment
	.venv/bin/python scripts/install_speculators.py
	$(TEST_ENV) .venv/bin/python -m pytest tests/test_speculators_export.py $(PYTEST_ARGS)

lint: setup ## Check style
	.venv/bin/ruff check
	.venv/bin/ruff format --check

types: setup ## Check types
	.venv/bin/ty check

format: setup ## Apply the style
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

lock: $(UV_READY) ## Resolve uv.lock anew and export Pants' locks from it
	.uv/bin/python scripts/lock.py

check-lock: $(UV_READY) ## Check that the locks are in step
	.uv/bin/python scripts/lock.py --check

pants: ## Let Pants check, test and package what needs no torch
	./pantsw tailor --check lint test package ::

wheels: setup ## Build every wheel and try each alone
	.uv/bin/python scripts/sglang_sources.py
	.venv/bin/python scripts/check_wheels.py $(if $(PANTS_DIST),--pants $(PANTS_DIST))

patches: setup ## Check the patches of SGLang on the sources they are for
	.uv/bin/python scripts/sglang_sources.py
	.venv/bin/python scripts/check_patches.py

clean: ## Remove what these targets made, except outputs/
	rm -rf .venv .uv .cache .pytest_cache .ruff_cache .pants.d .pids dist
	find packages scripts tests -name __pycache__ -prune -exec rm -rf {} +

# A marker stands for a finished step. What an interrupted step left behind is removed by the next run.
$(UV_READY):
	@rm -rf .uv; \
	for python in $(PYTHON) python3.13 python3.12 python3.11; do \
		if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			"$$python" -m venv .uv && exit 0; \
		fi; \
	done; \
	echo "make: found no CPython >= 3.11 with its venv module (on Debian: apt install python3-venv)." >&2; \
	echo "make: name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	exit 1
	.uv/bin/python -m pip install -qq --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

$(VENV_READY): $(UV_READY) uv.lock pyproject.toml $(wildcard packages/*/pyproject.toml)
	@if [ -e .uv/syncing ]; then rm -rf .venv; fi; touch .uv/syncing
	$(UV) sync --frozen
	@rm .uv/syncing; touch $@
