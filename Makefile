# make demo and make test each do all their own set-up, into .venv.
PYTHON ?= python3
LIGHT_TORCH ?= torch==2.13.0
BIN := .venv/bin
PIP_FLAGS := --disable-pip-version-check --quiet --constraint constraints.txt
# Of `make test`, where one worker runs the tests of a file, and `make quick`. Tests often wait for
# processes that start: three workers keep two cores busy.
WORKERS ?= 3
QUICK := tests/core tests/test_architecture.py tests/test_documents.py tests/test_vocabulary.py
# Of `make test-light`. Two files make records with agents and pictures, by SGLang's openai and torchvision.
LIGHT := tests/recorder tests/integrity tests/archive tests/hangdoctor \
	$(addprefix --ignore=tests/recorder/,test_agent_calls.py test_redact.py)
# Of `make test-long`: its parts, which the nightly workflow runs beside each other.
PART ?=
PARTS := core engine rollout agent record replay consistency hang debug rest
PART_core := tests/core tests/dryrun tests/launch
PART_engine := tests/engine tests/trainer tests/vision
PART_rollout := tests/rollout tests/vllm
PART_agent := tests/agent tests/evaluation
PART_record := tests/recorder tests/archive tests/integrity tests/importers tests/exports tests/fuzz tests/faults
PART_replay := tests/replayer tests/bug tests/why tests/trainers
PART_consistency := tests/consistency
PART_hang := tests/hangdoctor
PART_debug := tests/debug
PART_rest := $(addprefix --ignore=,$(foreach part,$(filter-out rest,$(PARTS)),$(PART_$(part)))) tests
# Of `make fuzz`.
SECONDS ?= 600
TARGET ?=
# Of `make bench`.
ONLY ?=
# One thread a process: two ranks and a server share the cores, more threads only wait.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
# Without cached bytecode every process compiles torch and Transformers again: a start takes 10 s, not 2 s.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo demo-real quick test test-light test-long fuzz bench gpu-check docs lint format env env-light clean

demo: env-light
	$(BIN)/areal-debug demo

demo-real: env
	$(BIN)/python examples/demo_real.py $(if $(QUESTIONS),--questions $(QUESTIONS))

# For the edit loop: under a minute.
quick: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --dist loadfile $(QUICK)

test: env
	$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --no-loadscope-reorder

# Without SGLang and Ray, so on every version of Python: the tests of what needs no engine.
test-light: env-light
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt "$(LIGHT_TORCH)" --editable ".[train,archive,query,dev]"
	$(BIN)/python -m pytest -m "not long and not sglang" -n $(WORKERS) $(LIGHT)

# All parts one after another, or one: `make test-long PART=hang`. Of the others, `rest`.
test-long: env
	$(BIN)/python -m pytest -m long -o faulthandler_timeout=1800 --durations=20 $(if $(PART),$(PART_$(PART)))

# Fresh hostile input for every reader, one after another; TARGET=record for one of them.
fuzz: env
	@$(BIN)/python -m tests.fuzz "$(SECONDS)" "$(TARGET)"

# Beside TRL, bare FSDP2, torchfrtrace, py-spy and others, into docs/measurements/benchmarks.md; ONLY="step hang"
# for some topics. On a quiet machine about half an hour.
bench: env
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable ".[bench]"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.peers $(if $(ONLY),--only $(ONLY))

# What holds on a GPU, as a table; DEVICE=cpu for the script itself.
gpu-check: env
	$(BIN)/python -m tests.gpu --device $(or $(DEVICE),cuda) --json build/gpu.json

# The site, into build/site: `python -m http.server -d build/site` shows it with its search.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: .venv/full.stamp

env-light:
	@if [ -f .venv/full.stamp ]; then $(MAKE) --no-print-directory .venv/full.stamp; \
	else $(MAKE) --no-print-directory .venv/light.stamp; fi

.venv/bin/pip:
	$(PYTHON) -m venv .venv

# pip finds the torch of a CPU, where it is configured to; uv is faster with the rest. Each process of
# the demo compiles what it imports and keeps it, which is less than all that is installed.
.venv/light.stamp: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Setting up .venv (light: no SGLang) ..."
	$(BIN)/pip install $(PIP_FLAGS) --no-compile uv "$(LIGHT_TORCH)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable ".[train,archive]"
	@touch $@

# uv, because the SGLang stack is 10 GB: half a minute instead of ten. It compiles all of it on all cores;
# processes that start together would each compile the same modules.
.venv/full.stamp: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Setting up .venv (full: with SGLang, Ray and the development tools) ..."
	$(BIN)/pip install $(PIP_FLAGS) uv
	UV_COMPILE_BYTECODE_TIMEOUT=600 $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable ".[all]"
	@touch $@

clean:
	rm -rf .venv runs .mypy_cache .pytest_cache .ruff_cache *.egg-info
