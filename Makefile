# Every target sets up what it needs in .venv; "make help" lists them. PYTHON=/path/to/python chooses the interpreter of a new .venv.

VENV := .venv
BIN := $(VENV)/bin
PYTHONS := python3.14 python3.13 python3.12 python3 python
PYENV := $(HOME)/.pyenv/versions

# New enough, and able to make a virtual environment (some systems ship Python without that).
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))

# Shell: set $$python to the first usable one, the newest named release first.
define find_python
python=; \
for candidate in $(if $(PYTHON),$(PYTHON),$(PYTHONS) $(PYENV)/3.14*/bin/python $(PYENV)/3.13*/bin/python $(PYENV)/3.12*/bin/python \
    $(PYENV)/*/bin/python); do \
  if "$$candidate" -c '$(USABLE)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo 'error: no Python >= 3.12 with venv found; looked at $(or $(PYTHON),$(PYTHONS) on PATH and $(PYENV)/*/bin/python);' \
    'install one, or name it: make PYTHON=/path/to/python' >&2; \
  exit 1; \
fi
endef

# $(call setup,EXTRA): the package with one extra, in $(VENV). The stamp of an extra holds the pyproject.toml it was installed from, so
# nothing happens while that is unchanged. An environment that is broken, too old or was made elsewhere (a moved or copied checkout, whose
# scripts would run the other one) is made anew.
define setup
@if ! { $(BIN)/python -c '$(USABLE)' && [ "$$(cat $(VENV)/made-in)" = "$(CURDIR)" ]; } >/dev/null 2>&1; then \
  $(find_python); \
  echo "Making $(VENV) with $$("$$python" --version)"; \
  rm -rf $(VENV); \
  "$$python" -m venv $(VENV) && echo "$(CURDIR)" > $(VENV)/made-in || exit 1; \
fi; \
if ! cmp -s pyproject.toml $(VENV)/installed-$(1).toml; then \
  echo "Installing jaxpage[$(1)] into $(VENV) (this takes a minute or two)"; \
  $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(1)]' && cp pyproject.toml $(VENV)/installed-$(1).toml; \
fi
endef

.PHONY: help demo kernels test test-slow mutants check format clean
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf 'make %-9s %s\n' "$$name" "$$text"; done

demo: ## generate text with a small model (downloads 93 MB the first time)
	$(call setup,demo)
	$(BIN)/jaxpage generate --model smollm2-135m --stats --max-tokens 48 --chat \
	  --prompt "What is gravity?" "Write one sentence about the sea." "Name three colours."

kernels: ## compile the kernels for TPUs and GPUs, without one, and write what bounds them to docs/measured (forty minutes)
	$(call setup,aot)
	set -e; for platform in gpu tpu; do \
	  out=docs/measured/kernels_$$platform; \
	  $(BIN)/jaxpage kernels --target $$platform --json $$out.jsonl --plot $$out.png > $$out.tmp; \
	  mv $$out.tmp $$out.md; \
	done

test: ## run the tests
	$(call setup,dev)
	$(BIN)/python -m pytest -n 2 --dist loadfile -q -m 'not slow'

test-slow: ## run the tests that take long: kernels in their interpreters and compilers, whole models, training
	$(call setup,dev)
	$(BIN)/python -m pytest -n 2 --dist load -q -m slow

mutants: ## plant faults in the kernels, one at a time, and see the tests catch each (fifteen minutes)
	$(call setup,dev)
	$(BIN)/python tests/mutants.py
	$(BIN)/python tests/mutants_gpu.py

check: ## lint, check the format, the types and the layer rule
	$(call setup,dev)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

format: ## format the code and sort the imports
	$(call setup,dev)
	$(BIN)/python -m ruff check --fix-only .
	$(BIN)/python -m ruff format .

clean: ## remove the environment, builds and caches; results/ stays
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
