# Two commands matter: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The build of torch (.ci/torch). For CUDA: make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130
export TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: setup demo test test-extended test-slow test-all faults power-loss erasures clocks strangers failures fuzz memory ledger agentx faults-system mutants drift matrix gpu gpu-page check lint docs clean

setup: $(STAMP)

$(STAMP): $(VENV)/.server
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

# What `foreword serve` needs, and nothing else.
$(VENV)/.server: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	.ci/torch $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[server]'
	touch $@

demo: $(VENV)/.server
	@$(BIN)/foreword demo

# A test process per core and two more (tests/conftest.py), one computing thread each: OpenMP threads that outnumber the cores
# wait for each other. Compiled modules are kept: the tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m "not slow and not extended" $(MORE)

# The same with more models, settings and examples, and checks of the repository itself, as structure and words.
test-extended: setup
	$(PYTEST) -m "extended and not slow" $(MORE)

# Slow tests of FILES.
FILES ?= tests

test-slow: setup
	$(PYTEST) -m slow $(FILES) $(MORE)

# All tests, also those that kill processes, inject faults for minutes, or need a real vLLM (FOREWORD_VLLM_PYTHON).
test-all: setup
	$(PYTEST) $(MORE)

# More options of a command.
MORE ?=

# Injects faults into every tier and prints a table: make faults FAULTS=2000 SEED=7 MORE=--clocks
FAULTS ?= 100000
SEED ?= 1

faults: setup
	OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=1 $(BIN)/python tests/store/fault_campaign.py --faults $(FAULTS) --seed $(SEED) --notes $(MORE)

# Opens disk stores on what a loss of power may leave, and prints a table: make power-loss STATES=24 SEED=7. Needs a C++ compiler.
STATES ?= 24

power-loss: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/store/power_loss_campaign.py --states $(STATES) --seed $(SEED) --notes $(MORE)

# Erases tenants while tiers fail and processes are killed, and prints a table: make erasures ERASURES=500 SEED=7
ERASURES ?= 10000

erasures: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/store/erasure_campaign.py --erasures $(ERASURES) --seed $(SEED) --notes $(MORE)

# Three servers on one store, one with a wrong wall clock: what differs from right clocks. make clocks OPERATIONS=2000 SEED=7
# With wrong clocks also: make faults MORE=--clocks, and make erasures MORE=--clocks.
OPERATIONS ?= 2000

clocks: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/store/clock_campaign.py --operations $(OPERATIONS) --seed $(SEED)

# Sends what strangers without a key may send to every port, and prints a table: make strangers MESSAGES=7000 SEED=7
MESSAGES ?= 100000

strangers: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/serving/stranger_campaign.py --messages $(MESSAGES) --seed $(SEED) --notes

# Lets calls inside of vLLM's connector fail, one at a time: make failures FAILURES=100 SEED=7. Needs FOREWORD_VLLM_PYTHON.
FAILURES ?= 1000

failures: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/integrations/failure_campaign.py --failures $(FAILURES) --seed $(SEED)

# Agents' traffic through vLLM alone, with stores, and behind routers: make agentx MODEL=FOLDER TRACES=FOLDER MORE="--steps 4".
# Needs FOREWORD_VLLM_PYTHON.
agentx: setup
	$(BIN)/python -m benchmarks.vllm.agentx $(MODEL) --traces $(TRACES) --vllm-python $(FOREWORD_VLLM_PYTHON) $(MORE)

# Compares the usage ledgers of a router and of servers with what engines count: make ledger REQUESTS=300 MORE=--vllm
ledger: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/serving/ledger_campaign.py --requests $(REQUESTS) --seed $(SEED) $(MORE)

# Sends almost right requests to every front, and prints a table: make fuzz REQUESTS=3000 SEED=7
REQUESTS ?= 200000

fuzz: setup
	OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=1 $(BIN)/python tests/serving/fuzz_campaign.py --requests $(REQUESTS) --seed $(SEED) --notes

# Looks for memory that grows with requests, and prints a table: make memory REQUESTS=10000 SEED=7 MORE="--only router --trace"
memory: REQUESTS = 40000
memory: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/serving/memory_campaign.py --requests $(REQUESTS) --seed $(SEED) --notes $(MORE)

# Injects faults into a whole system of servers, router and stores: make faults-system SECONDS=3600 SEED=7
SECONDS ?= 60

faults-system: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/serving/system_run.py --seconds $(SECONDS) --seed $(SEED)

# Plants defects in a copy of the sources; the tests must catch each. With FOREWORD_VLLM_PYTHON also those of the connector.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py

# What a release of vLLM changed of all that Foreword uses: make drift OLD=.venv-vllm NEW=vllm-0.34.0-cp38-abi3-manylinux.whl
OLD ?= .venv-vllm

drift:
	$(PYTHON) tests/integrations/vllm_drift.py $(OLD) $(NEW)

# The referee over the supported releases of vLLM, whose environments it makes; writes the table of the docs.
MATRIX := .venv-vllm-0.31 .venv-vllm .venv-vllm-0.33

matrix: setup
	.ci/vllm .venv-vllm
	.ci/vllm .venv-vllm-0.31 0.31.0 --share .venv-vllm
	.ci/vllm .venv-vllm-0.33 0.33.0 --over 0.32.0 --share .venv-vllm
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(BIN)/foreword conform --json-file results/conform.json \
	  $(MATRIX:%=--matrix %/bin/python) --page dev/conformance.md

# What a tier is worth on a GPU, in below eight minutes (seven more if it has vLLM), with the Python of the machine:
# make gpu PYTHON=python3 GPU="--disk /nvme"
gpu:
	$(PYTHON) -m benchmarks.gpu.plan $(GPU)

# Puts a run into docs/benchmarks.md: make gpu-page RESULTS=results/gpu-plan.json
RESULTS ?= results/gpu-plan.json

gpu-page: setup
	$(BIN)/python -m benchmarks.gpu.plan --publish $(RESULTS)
	$(BIN)/python docs/generate.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet tests/test_structure.py tests/test_vocabulary.py tests/test_reference_pages.py

# The documentation as a site in dist/site. A broken link is an error, and so is a question of users that its search does not find.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	FOREWORD_SITE=dist/site $(BIN)/python -m pytest --quiet tests/test_site.py tests/test_rendered_pages.py

check: lint test

clean:
	rm -rf $(VENV) dist build *.egg-info
