# Everything a newcomer needs. `make` alone lists it.
.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm run test test-long check bench clean demo-model lock
ARGS ?=
BIN := .venv/bin
# Containers often forbid Python to keep what it compiled: each process would compile all anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install into .venv what the lock names (nothing to do: 0.1 s)
	@sh infra/setup.sh

setup-vllm: setup ## Install vLLM, for the GPU if there is one, into .venv-vllm (Linux)
	@sh infra/setup-vllm.sh

run: setup ## See a model learn through Kafka while processes are killed
	@id=demo; n=2; while [ -e "runs/$$id" ]; do id=demo-$$n; n=$$((n + 1)); done; \
	$(BIN)/rlstreams up infra/examples/demo.toml --run.id=$$id $(ARGS)

test: setup ## All tests but the long ones
	@sh infra/tests.sh "not slow" $(ARGS)

test-long: setup ## All tests
	@sh infra/tests.sh "" $(ARGS)

check: setup ## Format, lint, types, and the tests that need no broker
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@sh infra/tests.sh "not slow" --no-broker $(ARGS)

bench: setup ## Measure; results go to tests/bench/results
	@status=0; for script in tests/bench/*.py; do echo "$$script"; \
	$(BIN)/python "$$script" $(ARGS) || status=1; done; exit $$status

demo-model: setup ## Make the demo's warm-started model anew
	@$(BIN)/python -m infra.demo.make_model $(ARGS)

lock: setup ## Resolve the dependencies anew into infra/locks
	@sh infra/locks/make.sh

clean: ## Remove the environment and caches; runs/ is yours and stays
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
