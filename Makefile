# `make demo` and `make test` do their own set-up in .venv; nothing else on the machine is changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

WORKERS ?= 12
MASTER ?= local[*]
DATA ?=
EVAL ?=
OUT ?= build/demo
RUN ?= $(patsubst %/,%,$(OUT))-run
TRAIN ?= --model cnn --protocol asp --servers 2 --epochs 5 --batch-size 120
NAME ?= cifar10
PLAN ?= quick
KILLS ?= 200
FILES ?= 10000
SEED ?=
EXCHANGE ?=
TO ?= data/$(NAME)
ARGS ?=

ENV := . .venv/env.sh
SETUP := pyproject.toml conf/setup.sh conf/constraints.txt
READY := .venv/.ready
READY_TRAINER := .venv/.ready-trainer
READY_DEV := .venv/.ready-dev
SAMPLE := build/sample
# A driver that only talks to itself need not look its host name up.
LOCAL_IP := $(if $(filter local%,$(MASTER)),SPARK_LOCAL_IP=127.0.0.1,)
# Tests start hundreds of Pythons: none should compile this checkout again. Several processes share the cores: a thread that
# spins while it waits for another one, as those of OpenMP and OpenBLAS do, takes a core from the thread that it waits for.
TEST_ENV := SPARK_LOCAL_IP=127.0.0.1 PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
# A file's tests share what is slow to make, so a file goes to one process; the folders come in order, the shortest tests last.
SPREAD := --dist loadfile --no-loadscope-reorder
PYTEST := python -m pytest --durations=10

.PHONY: help setup setup-dev demo demo-shards test test-fast test-full chaos chaos-shards fuzz lint fetch hdfs-up hdfs-down bench-sharding bench-trainer bench-exchange bench-recovery bench-gpu bench-cluster study study-check clean clean-venv

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@echo "  DATA=$(if $(DATA),$(DATA),(a small generated set)) WORKERS=$(WORKERS) OUT=$(OUT) MASTER=$(MASTER) ARGS=$(ARGS)"

setup: $(READY) ## install Python packages and, where missing, Java into .venv

$(READY): $(SETUP)
	@PYTHON='$(PYTHON)' conf/setup.sh
	@touch $@

$(READY_DEV): $(SETUP)
	@PYTHON='$(PYTHON)' conf/setup.sh dev
	@touch $(READY) $(READY_TRAINER) $@

$(READY_TRAINER): $(SETUP)
	@PYTHON='$(PYTHON)' conf/setup.sh trainer
	@touch $(READY) $@

demo: demo-shards $(READY_TRAINER) ## shard DATA as demo-shards does, then train on the shards (TRAIN) and report into RUN
	@$(ENV); python -m trainer --shards '$(OUT)' --output '$(RUN)' $(TRAIN)

demo-shards: $(READY) ## shard DATA (a path or hdfs:// URI; default a generated set), with EVAL beside it, over WORKERS into OUT
	@$(ENV); \
	  data='$(DATA)'; eval='$(EVAL)'; args=(); \
	  if [ -z "$$data" ]; then data=$(SAMPLE); eval=$(SAMPLE); python -m pipeline sample --to $(SAMPLE); args=(--preset plain --components 50 --n-init 4); fi; \
	  $(LOCAL_IP) spark-submit --master '$(MASTER)' jobs/distribution_aware.py \
	    --input "$$data" $${eval:+--eval-input "$$eval"} --output '$(OUT)' --workers $(WORKERS) "$${args[@]}" $(ARGS)

# The type checker reads the packages that it follows once, so that `make test` does not.
setup-dev: $(READY_DEV) ## install and download all that the tests need, so that none of them does
	@$(ENV); python -m tests.clusters.environments
	@$(ENV); mkdir -p build; echo 'import hypothesis, numpy, PIL.Image, pyspark.ml, pyspark.sql, pytest, torch, zmq' >build/typed.py; mypy build/typed.py

# The linter and the type checker run beside the tests. What they say is shown after them.
test: $(READY_DEV) ## run the linter, the type checker and the default tier of the tests: before every commit
	@$(ENV); said=$$(mktemp); trap 'rm -f "$$said"' EXIT; \
	  $(MAKE) --no-print-directory lint >"$$said" 2>&1 & lint=$$!; \
	  python -m tests.executed --record; tests=0; \
	  $(TEST_ENV) RECORD_CALLS='$(CURDIR)/build/executed' $(PYTEST) -n 4 $(SPREAD) -m 'not full' $(ARGS) || tests=$$?; \
	  linted=0; wait $$lint || linted=$$?; cat "$$said"; exit $$((tests ? tests : linted))

test-fast: $(READY_DEV) ## run the tests that start no JVM, no cluster and no training run
	@$(ENV); $(TEST_ENV) $(PYTEST) -n 2 --dist worksteal -m 'not full and not slow' tests/unit $(ARGS)

test-full: $(READY_DEV) ## run what `make test` leaves out: before every merge, after `make test`
	@$(ENV); python -m tests.clusters.environments >/dev/null; $(TEST_ENV) $(PYTEST) -n 4 $(SPREAD) -m full $(ARGS); python -m tests.executed

chaos: $(READY_DEV) ## kill, freeze and cut training runs at random moments, KILLS times, with EXCHANGE alone if given; SEED repeats what was drawn
	@$(ENV); $(TEST_ENV) python -m tests.campaigns.training --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(EXCHANGE),--exchange $(EXCHANGE)) $(ARGS)

chaos-shards: $(READY_DEV) ## kill, freeze and starve sharding jobs at random moments, KILLS times; SEED repeats what was drawn
	@$(ENV); $(TEST_ENV) python -m tests.campaigns.shards --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(READY_DEV) ## read FILES damaged files of every kind that the product reads; SEED repeats what was drawn
	@$(ENV); $(TEST_ENV) python -m tests.campaigns.fuzz --files $(FILES) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: $(READY_DEV) ## run the linter, the format check and the type checker
	@$(ENV); status=0; ruff check . || status=1; \
	  ruff check --quiet --preview --select PLW1514 pipeline trainer jobs conf || status=1; ruff format --check . || status=1; mypy || status=1; exit $$status

fetch: $(READY) ## download NAME=cifar10|cifar100 from its home page to TO (a folder or hdfs:// URI)
	@$(ENV); python -m pipeline fetch '$(NAME)' --to '$(TO)' $(ARGS)

hdfs-up: $(READY_DEV) ## start an HDFS of one NameNode and three DataNodes on this machine
	@$(ENV); python -m tests.clusters hdfs up

hdfs-down: $(READY_DEV) ## stop it; its data stay for the next start
	@$(ENV); python -m tests.clusters hdfs down

bench-sharding: $(READY_DEV) ## time each sharding phase beside scikit-learn and spark.ml
	@$(ENV); SPARK_LOCAL_IP=127.0.0.1 python -m tests.benchmarks.sharding $(ARGS)

bench-trainer: $(READY_DEV) ## compare the trainer's messages, speed and memory with the least there could be (SHARDS=DIR)
	@$(ENV); SPARK_LOCAL_IP=127.0.0.1 python -m tests.benchmarks.trainer $(if $(SHARDS),--shards '$(SHARDS)') $(ARGS)

bench-exchange: $(READY_DEV) ## time a step of every exchange beside gloo, plain sockets and torchft (ARGS="--json FILE")
	@$(ENV); python -m tests.benchmarks.exchange $(ARGS)

bench-recovery: $(READY_DEV) ## time how long exchanges among workers take to recover from killed and frozen ones
	@$(ENV); python -m tests.benchmarks.recovery $(ARGS)

bench-gpu: $(READY_DEV) ## images/s of several workers on one GPU beside one plain torch process (needs a GPU)
	@$(ENV); SPARK_LOCAL_IP=127.0.0.1 python -m tests.benchmarks.gpu $(ARGS)

bench-cluster: $(READY_DEV) ## time a training run on a Spark cluster beside the same run on one host
	@$(ENV); SPARK_LOCAL_IP=127.0.0.1 python -m tests.benchmarks.cluster $(ARGS)

study: $(READY_DEV) ## train PLAN (conf/study, or a file) with many seeds into build/study/PLAN, and report on it
	@$(ENV); $(if $(filter quick,$(PLAN)),python -m pipeline sample --to $(SAMPLE);) \
	  $(LOCAL_IP) python -m trainer.study '$(PLAN)' --output 'build/study/$(basename $(notdir $(PLAN)))' $(ARGS)

study-check: $(READY_DEV) ## write the tables of conf/study/results from their ledgers into build/study-check, and compare their digests
	@$(ENV); python -m trainer.study.check $(ARGS)

clean: ## delete what demo and the checks wrote (build/ and caches); downloads and .venv stay
	@rm -rf build .pytest_cache .ruff_cache .mypy_cache .hypothesis spark-warehouse metastore_db artifacts derby.log
	@find pipeline jobs trainer tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

clean-venv: ## delete .venv
	@rm -rf .venv
