# Each verb sets everything up by itself: a virtual environment in .venv and the pinned
# packages of constraints.txt. Needs Python 3.11 or newer, pip and make; nothing else.
# Variables: PYTHON (which Python), PIP_ARGS (e.g. --index-url for CPU-only torch wheels),
# WORKERS (of pytest).

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
OUT ?= demo-out
WORKERS ?= 2

# Other people's measurements and profiles, where this machine has them; see docs/data.md.
ifneq ($(wildcard ../shared/data),)
export MESHWRIGHT_DATA ?= $(abspath ../shared/data)
endif
# One thread a process: the tests and the demo start several processes on few cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help setup demo test test-further test-all lint format docs test-zoo test-faults bench bench-job-stream bench-job-stream-quick bench-partitioners-quick clean fuzz

help:
	@echo "make demo   plan a small Llama for 4 local processes and train it by that plan"
	@echo "make test   run the tests"
	@echo "make test-further  more cases of what make test runs; CI runs both"
	@echo "make test-all  also the slow ones (an hour on 2 cores): every pair of the composition table"
	@echo "make test-zoo  every architecture of transformers, small, under every axis (hours)"
	@echo "make test-faults  ten runs that are killed, starved or damaged, and resumed (minutes)"
	@echo "make fuzz   100,000 mutated documents: only clean errors, in bounded time and memory"
	@echo "make lint   ruff, mypy, import contracts"
	@echo "make docs   the documentation as a site, in site/"
	@echo "make bench  the figures of the README, all of them (takes a while)"
	@echo "make bench-job-stream-quick  policies of the job stream side by side, in minutes"
	@echo "make bench-job-stream  all of it, with figures and a results file in docs"
	@echo "make bench-partitioners-quick  every partitioner on a world of each kind, in minutes"
	@echo "make clean  remove what the others made"

$(BIN)/python:
	@echo "== making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "meshwright needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

# Torch first and by itself: its pinned version decides which wheel everything else sees.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing pinned packages (torch is the big one)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[data,hf,gpu,learn,ray,dev]"
	@touch $@

setup: $(VENV)/.installed

demo: setup
	@mkdir -p $(OUT)
	@echo "== 1/3 measuring this machine with 4 processes"
	@$(BIN)/meshwright probe --processes 4 --seconds 8 --out $(OUT)/probe.json
	@echo "== 2/3 planning examples/tiny-llama for it"
	@$(BIN)/meshwright plan --model hf:examples/tiny-llama --cluster $(OUT)/probe.json \
	    --global-batch 16 --seq-len 128 --dtype float32 --learning-rate 1e-3 --out $(OUT)/plan.json --explain
	@echo "== 3/3 training it on 4 processes by $(OUT)/plan.json"
	@$(BIN)/meshwright run $(OUT)/plan.json --data examples/tiny-llama/genesis.npy --steps 40 \
	    --measure --measurement $(OUT)/measurement.json

test: setup
	@echo "== running the tests"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-further: setup
	@echo "== running further cases"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "further and not slow and not gpu"

test-all: setup
	@echo "== running all tests, slow ones too"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu"

test-zoo: setup
	@echo "== every architecture of transformers, small, under every axis"
	@$(BIN)/python -m benchmarks.zoo --out zoo.jsonl

test-faults: setup
	@echo "== runs that are disturbed, and resumed to the undisturbed curve"
	@$(BIN)/python -m benchmarks.faults --runs 10

fuzz: setup
	@echo "== mutating documents of every kind; failing ones are kept in fuzz-failures"
	@$(BIN)/python -m benchmarks.fuzz_documents

lint: setup
	@echo "== ruff, mypy, import contracts"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Sphinx and what it needs are light, and wanted by nothing else.
$(VENV)/.installed-docs: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(VENV)/.installed-docs
	@echo "== docs/ as a site in site/, warnings are errors"
	@rm -rf site
	@$(BIN)/python -m sphinx -b html -W --keep-going -q -d .doctrees docs site
	@$(BIN)/python -m tests.links site

bench: setup
	@echo "== reading a 405B-parameter model"
	@$(BIN)/python -m benchmarks.capture
	@echo "== a whole plan, and where its time goes"
	@$(BIN)/python -m benchmarks.planning_time
	@echo "== strategies and schedules per second"
	@$(BIN)/python -m benchmarks.search_speed
	@echo "== closed forms against the simulator"
	@$(BIN)/python -m benchmarks.fidelity
	@echo "== a dry run of a 405B-parameter model on 4,096 GPUs"
	@$(BIN)/python -m benchmarks.verify_speed
	@echo "== predicted against measured on this machine"
	@$(BIN)/python -m benchmarks.predicted_vs_measured
	@echo "== the executors against scripts written by hand"
	@$(BIN)/python -m benchmarks.executor_overhead
	@echo "== what a rank needs to start"
	@$(BIN)/python -m benchmarks.materialize
	@echo "== predicted against measured memory of pipelines"
	@$(BIN)/python -m benchmarks.memory_of_pipelines

bench-job-stream: setup
	@echo "== policies of the job stream, test seeds of all laws"
	@$(BIN)/python benchmarks/job_stream.py
	@echo "== and on any cluster"
	@$(BIN)/python -m benchmarks.job_stream_world --workers 2 --out docs/results

bench-job-stream-quick: setup
	@echo "== policies of the job stream, a few short episodes"
	@$(BIN)/python benchmarks/job_stream.py --quick

bench-partitioners-quick: setup
	@echo "== partitioners, a world of each kind"
	@$(BIN)/python benchmarks/partitioners.py --quick

clean:
	rm -rf $(VENV) $(OUT) site .doctrees docs/beside dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache
