# The names of these targets are fixed: everybody's fingers and CI agree on them. `make help` lists them.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
# AGAIN=1: only what failed the last time.
PYTEST := $(VENV)/bin/pytest$(if $(AGAIN), --last-failed --last-failed-no-failures none)
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help setup lock check test test-root interop rig rig-up rig-down rig-shell test-rig bench fuzz full quickstart clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: ## install everything a developer needs (system packages when root, then the virtual environment)
	scripts/setup

lock: ## refresh requirements.lock from pyproject.toml
	scripts/lock

check: ## ruff, mypy strict, import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

test: ## unit, conformance, hostile and property tests: no network but loopback, no root needed
	$(PYTEST) tests/unit tests/conformance tests/hostile tests/property -m "not root and not interop"

test-root: ## what needs root: mounts, ownership, device nodes
	$(PYTEST) tests -m "root and not interop" --ignore=tests/rig

interop: ## against the real registry, crane, oras, skopeo, umoci, kpt
	$(PY) -m rig build registry crane oras containerd
	$(PYTEST) tests/interop

rig: ## build the real engines into the cache (nothing is rebuilt when they are there)
	$(PY) -m rig build

rig-up: ## start a cluster on this machine
	$(PY) -m rig up

rig-down: ## stop it and leave nothing behind
	$(PY) -m rig down

rig-shell: ## a shell with KUBECONFIG set
	$(PY) -m rig shell

test-rig: ## tests on the real cluster
	$(PYTEST) tests/rig

bench: ## side by side with the peers (QUICK=1: five minutes; ONLY=work,…; ROUNDS=n; DOCS=1: into the docs)
	$(PY) -m rig build registry crane containerd
	$(PY) -m bench $(if $(DOCS),--docs)

fuzz: ## every fuzzer, SECONDS=20 each unless told
	$(PY) -m tests.fuzz --seconds $(or $(SECONDS_EACH),20)

quickstart: ## the README's quickstart, run exactly as written
	$(PYTEST) tests/interop/test_quickstart.py

full: ## every test at its full count and size (UNLADE_FULL=1)
	mkdir -p artifacts
	UNLADE_FULL=1 UNLADE_FIGURES=$(CURDIR)/artifacts/figures.jsonl $(MAKE) check test test-root interop test-rig fuzz

clean: ## remove caches inside the checkout
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis artifacts dist build
