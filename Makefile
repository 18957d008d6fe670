# `make` or `make help` lists the targets. Everything runs in $(VENV), which `make env` fills with the versions pinned
# in constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := hf,viz,test,dev
# torchtitan, for the tests of its MoE block: what it imports for that, and nothing of what it wants for training
BARE   := torchtitan spmd_types tyro docstring_parser

# of the browser tests alone, installed beside the environment
BROWSER := build/playwright

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all test-browser test-npu-sim test-npu models mutate lint golden bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@printf '\n  variables: PYTHON=%s VENV=%s ARGS="more arguments for the command", e.g. make test ARGS="-k fsdp -x"\n' '$(PYTHON)' '$(VENV)'

env: $(STAMP)  ## make .venv with the package and all pinned tools (once; again when the pins change)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("ep_fx needs Python 3.11 or newer; $(PYTHON) is %d.%d: make env PYTHON=python3.11" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo 'make env: "$(PYTHON) -m venv $(VENV)" failed, see above (Debian: apt-get install python3-venv)' >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' || { echo 'make env: pip could not install the pinned versions into $(VENV), see above' >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt $(BARE) || { echo 'make env: pip could not install $(BARE) into $(VENV), see above' >&2; exit 1; }
	@touch $@

demo: env  ## a tiny MoE on 4 local ranks: transform, verify, picture, train
	$(BIN)/python examples/demo.py $(ARGS)

test: env  ## the default suite, no device needed; budget: 14 minutes on 2 cores
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not browser and not npu_sim and not npu_hardware" $(ARGS)

test-all: env  ## everything, slow tests and all models too (and GPU tests where there is one); budget: 60 minutes
	$(BIN)/python -m pytest -q $(ARGS)

lint: env  ## ruff, mypy --strict, and the layers (import-linter)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-browser: env  ## graph.html in a headless Chromium without network, not part of CI; skips with a reason where it cannot run
	@test -d $(BROWSER)/playwright || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --target $(BROWSER) playwright || echo 'make test-browser: pip could not install playwright, see above' >&2
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { test "$$(id -u)" = 0 && apt-get install -y -qq chromium; } || echo 'make test-browser: no chromium (Debian: apt-get install chromium)' >&2
	PYTHONPATH=$(BROWSER) $(BIN)/python -m pytest -q -m browser tests/browser $(ARGS)

test-npu-sim: env  ## the real torch_npu on stand-ins for CANN, in build/npu-sim; no NPU needed; budget: 5 minutes
	$(BIN)/python -m tests.npu_sim $(ARGS)

test-npu:  ## on a machine with NPUs and CANN, in the environment of PYTHON; skips with a reason elsewhere
	$(PYTHON) -m pytest -q -m npu_hardware tests/npu_hardware $(ARGS)

models: env  ## every MoE family of transformers on 4 local ranks; rewrites docs/models.md; budget: 20 minutes
	$(BIN)/python -m pytest -q -m models --record-models tests/models/matrix $(ARGS)
	$(BIN)/python -m docs.generate

mutate: env  ## break 1,000 graphs at random and see which the rules catch; prints the table; budget: 25 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.mutate $(ARGS)

golden: env  ## rewrite the golden files after a wished change of the graph's text; read the diff
	$(BIN)/python -m pytest -q -m golden --update-golden $(ARGS)

bench: env  ## step time against eager FSDP2 + EP on 4 local ranks, capture time, rules on 100,000 nodes; ARGS="--pairs 30"
	$(BIN)/python -m benchmarks $(ARGS)

docs: env  ## regenerate the parts of docs/ that come from the graph, and the pictures of docs/gallery.md
	$(BIN)/python -m docs.generate $(ARGS)
	$(BIN)/python -m docs.gallery $(ARGS)

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
