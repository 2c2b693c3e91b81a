# Two commands do all the set-up on a machine with Python 3.11+ and make: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?= -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help simulate simulate-bugs test-kill test-soak run test lint docs lock vectors bench bench-check bench-scale soak sim-routing test-vllm test-sglang test-streams test-redis test-image test-langchain conformance fuzz test-fronts clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

run: $(VENV)/run.stamp ## the gateway before simulated replicas, on 127.0.0.1:8000
	@$(BIN)/detgate demo $(ARGS) || [ $$? -eq 130 ]

# Types are checked while the tests run, and told of behind them. Compiled modules are kept, whatever the environment says:
# each test process would compile them anew.
test: $(VENV)/dev.stamp ## linters, types, layers and every test that needs no real engine
	$(LINT)
	@mkdir -p .cache
	@echo '$(BIN)/mypy, beside the tests'; $(BIN)/mypy > .cache/mypy.txt 2>&1 & types=$$!; \
	echo '$(BIN)/python -m pytest $(PYTEST_ARGS)'; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS); tests=$$?; \
	wait $$types; types=$$?; cat .cache/mypy.txt; [ $$tests -eq 0 ] && [ $$types -eq 0 ]

lint: $(VENV)/dev.stamp ## linters, types and layers alone
	$(LINT)
	$(BIN)/mypy

define LINT
$(BIN)/ruff check .
$(BIN)/ruff format --check .
$(BIN)/lint-imports
endef

docs: $(VENV)/docs.stamp ## the site of the documents in build/site, its links and anchors checked
	$(BIN)/zensical build --strict --clean

vectors: ## golden vectors checked by a second implementation, in Node
	node tests/vectors/check.mjs

bench: $(VENV)/dev.stamp ## what a request costs beside nginx; ARGS="--url http://127.0.0.1:8000 --pid 4711 --name other" for another gateway
	$(BIN)/python -m tests.bench $(ARGS)

bench-check: $(VENV)/dev.stamp ## whether a request still costs about what it did, in units of nginx; ARGS=--planted tries a doubling
	$(BIN)/python -m tests.bench check $(ARGS)

bench-scale: $(VENV)/dev.stamp ## what a request costs with 5,000 in flight, 256 replicas, several workers; the memory of 9,000 streams
	$(BIN)/python -m tests.bench.scale $(ARGS)

soak: $(VENV)/dev.stamp ## a million requests of 100,000 sessions over the wire while memory stays flat; ARGS=100000 for fewer
	$(BIN)/python -m tests.bench.soak $(ARGS)

sim-routing: $(VENV)/run.stamp ## what routing.slack costs and buys; ARGS="--replicas 8 --in-flight 512" for another fleet
	$(BIN)/python -m tests.routing_simulation $(or $(ARGS),--plot docs/images/routing.svg)

test-vllm: $(VENV)/dev.stamp ## against real vLLM servers on the CPU, which it installs and starts
	$(BIN)/python -m pytest tests/engines/test_vllm.py tests/engines/test_gateway_vllm.py tests/engines/test_diff_vllm.py \
		tests/engines/test_evidence_vllm.py tests/engines/test_launch_vllm.py tests/engines/test_steps_vllm.py --timeout 1800 $(ARGS)

test-sglang: $(VENV)/dev.stamp ## against real SGLang servers on the CPU, which it installs and starts
	$(BIN)/python -m pytest tests/engines/test_sglang.py tests/engines/test_gateway_sglang.py \
		tests/engines/test_evidence_sglang.py tests/engines/test_launch_sglang.py tests/engines/test_steps_sglang.py --timeout 1800 $(ARGS)

test-kill: $(VENV)/dev.stamp ## kill -9 in mid-traffic, 200 times; ARGS=1000 for more
	$(BIN)/python -m tests.killing $(ARGS)

test-soak: $(VENV)/dev.stamp ## a million sessions, prompts and keys while memory stays flat, and a million records read back
	$(BIN)/python -m tests.soak $(ARGS)

simulate: $(VENV)/dev.stamp ## gateways, store and replicas in virtual time, SEEDS=2000 times with faults; ARGS="--seed 7" plays one
	$(BIN)/python -m tests.simulate $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

simulate-bugs: $(VENV)/dev.stamp ## a seed for each planted bug, searched anew
	$(BIN)/python -m tests.simulate --bugs $(if $(SEEDS),--seeds $(SEEDS),--seeds 1000) $(ARGS)

test-streams: $(VENV)/dev.stamp ## 2,000 streams through one process while it says that it lives
	STREAMS=2000 $(BIN)/python -m pytest tests/test_capacity.py -s $(ARGS)

conformance: $(VENV)/dev.stamp ## public HTTP suites, fetched: all, or ARGS="h1spec slowhttptest"; docs/security.md names them
	$(BIN)/python -m tests.conformance $(ARGS)

fuzz: $(VENV)/dev.stamp ## bodies, streams and ledgers fuzzed by atheris, a minute each; ARGS="document --seconds 600" for one, longer
	$(BIN)/python -m tests.fuzz $(ARGS)

test-fronts: $(VENV)/dev.stamp ## 10,000 fuzzed requests through nginx and HAProxy, and straight; ARGS="--seed 2" for others
	$(BIN)/python -m tests.hostile.fronts $(ARGS)

test-image: $(VENV)/dev.stamp ## the image's build and start commands, without a container engine
	$(BIN)/python -m pytest tests/deploy/test_container.py $(ARGS)

test-redis: $(VENV)/dev.stamp ## a Redis primary cut and a replica promoted 21 times, a gateway killed 200 times, under load
	ROUNDS=21 $(BIN)/python -m pytest tests/shared/test_failover.py -n 0 -s --timeout 1800 $(ARGS)
	ROUNDS=200 $(BIN)/python -m pytest tests/shared/test_kills.py -n 0 -s --timeout 7200 $(ARGS)
	EXAMPLES=5000 $(BIN)/python -m pytest tests/shared/test_scripts.py tests/shared/test_epochs.py --timeout 1800 $(ARGS)

test-langchain: $(VENV)/dev.stamp ## LangChain before the gateway, in an environment of its own, which it makes
	$(BIN)/python -m venv .cache/langchain
	.cache/langchain/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements/dev.txt -r requirements/langchain.txt
	PYTHONPATH=. .cache/langchain/bin/python -m pytest tests/clients/test_langchain.py -p no:langsmith_plugin $(ARGS)

COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --strip-extras \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' $(ARGS)

lock: $(VENV)/dev.stamp ## pin what pyproject.toml asks for; ARGS=--upgrade takes newer releases
	$(COMPILE) pyproject.toml --extra redis --extra otel --output-file requirements/lock.txt
	$(COMPILE) pyproject.toml --extra redis --extra otel --extra docs --extra dev --constraint requirements/lock.txt \
		--output-file requirements/dev.txt
	$(COMPILE) requirements/langchain.in --constraint requirements/dev.txt --output-file requirements/langchain.txt
	$(COMPILE) requirements/docs.in --constraint requirements/dev.txt --output-file requirements/docs.txt
	$(COMPILE) requirements/build.in --constraint requirements/dev.txt --output-file requirements/build.txt

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find gateway tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed, and $(PYTHON) is not: name one, as in 'make run PYTHON=python3.12'"; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Everything by the lock's hashes; the package itself last, by the pinned builder and nothing else.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
EDITABLE = $(INSTALL) --no-deps --no-build-isolation --editable .

$(VENV)/run.stamp: requirements/lock.txt requirements/build.txt pyproject.toml | $(BIN)/python
	$(INSTALL) --require-hashes -r requirements/build.txt -r requirements/lock.txt
	$(EDITABLE)
	@touch $@

$(VENV)/docs.stamp: requirements/docs.txt | $(BIN)/python
	$(INSTALL) --require-hashes -r requirements/docs.txt
	@touch $@

$(VENV)/dev.stamp: requirements/dev.txt requirements/build.txt pyproject.toml | $(BIN)/python
	$(INSTALL) --require-hashes -r requirements/build.txt -r requirements/dev.txt
	$(EDITABLE)
	@touch $@ $(VENV)/run.stamp
