# Everything happens in .venv: made on first use, brought up to date when pyproject.toml or constraints.txt change.
# make PYTHON=python3.12 ... makes it with that interpreter instead of the first suitable one.

VENV := .venv
BIN := $(VENV)/bin
PYTHON :=
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# What the check and pip leave in build/. The rest is not ours to remove: training keeps hours of work in build/train_mini.
BUILT := build/check build/lib build/bdist.*
BENCHES = $(filter-out gpu,$(shell $(BIN)/python -c 'from mmsdk.plugins import available; print(*available("mmsdk.apps.bench"))'))

# `activate` is the last thing that venv writes: without it the set-up was interrupted, and without a Python that runs, the one it was made
# with is gone. Nothing mends either, so it goes and is made anew.
$(shell test ! -d $(VENV) || { test -x $(BIN)/python && test -f $(BIN)/activate; } || rm -rf $(VENV))

.DEFAULT_GOAL := help
.PHONY: help demo test check docs bench bench-gpu clean build/check

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F@ '{printf "%-17s %s\n", $$1, $$2}'

demo: $(VENV)/core ## a real model answers questions about three pictures and a clip, a robot acts; pictures and a film go to demo/
	@$(BIN)/mmsdk demo --write
	@echo 'ask about your own: $(BIN)/mmsdk ask PATH... "question"'

# A process for each core, up to four (each holds the small models once), a file of tests on one of them.
test: check ## every check, then every test
	$(BIN)/pytest --numprocesses=logical --maxprocesses=4 --dist=loadfile

check: $(VENV)/dev build/check ## format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd build/check && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p mmsdk
	cd build/check && ../../$(BIN)/lint-imports ../../pyproject.toml --cache-dir ../../.import_linter_cache

docs: $(VENV)/dev ## the pages of docs/ as a site in build/docs, which needs no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'open build/docs/index.html'

bench: $(VENV)/dev ## run every bench on this machine
	@set -e; for name in $(BENCHES); do $(BIN)/mmsdk bench $$name; done

# Kept under another name until it is whole.
bench-gpu: $(VENV)/dev ## kernels and whole steps on a GPU, after their tests (red prints no number), into benchmarks/results/gpu.json
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "bench-gpu: torch sees no GPU on this machine")'
	$(BIN)/pytest -q tests/kernels tests/attention tests/decoder/test_steps.py tests/quant/test_launched.py
	$(BIN)/mmsdk bench kernels
	$(BIN)/mmsdk bench gpu --json > benchmarks/results/gpu.json.part
	mv benchmarks/results/gpu.json.part benchmarks/results/gpu.json
	$(BIN)/mmsdk bench gpu --committed

clean: ## remove what was made here (fetched weights stay in the user's cache, what training made in build/train_mini)
	rm -rf $(VENV) $(BUILT) build/docs dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@set -e; found=; recent=; for python in $(CANDIDATES); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    recent=$$python; if $$python -c 'import ensurepip, venv' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$recent" ]; then \
	    echo "mmsdk needs Python 3.11 or newer; looked for: $(CANDIDATES). Install one, or name it: make PYTHON=/path/to/python ..." >&2; exit 1; \
	fi; \
	if [ -z "$$found" ]; then \
	    echo "$$recent cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$($$found --version)"; \
	$$found -m venv --clear $(VENV) || { rm -rf $(VENV); echo "$$found could not make $(VENV), see above" >&2; exit 1; }

# pip in short lines where no terminal shows its progress: each large download, the unpacking, and every 20 seconds what is there by now.
# Its own exit code would be lost in the pipe, so a word tells of its failure; the clock ends with the shell that started it.
BRIEFLY = { $(INSTALL) || echo FAILED; } | { \
	begun=$$(date +%s); \
	say() { echo "  $$(($$(date +%s) - begun)) s: $$*"; }; \
	size() { du -sh $(VENV) 2>/dev/null | cut -f1; }; \
	{ while sleep 20 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do say "$(VENV) holds $$(size)"; done; } & clock=$$!; \
	code=0; \
	while read -r word rest; do case "$$word $$rest" in \
	    "FAILED ") code=1 ;; \
	    Downloading*"("[0-9][0-9]*" MB)" | Downloading*" GB)") say "downloading $${rest\#\#*/}" ;; \
	    "Installing collected packages: "*) set -- $$rest; say "unpacking $$(($$\# - 2)) packages" ;; \
	esac; done; \
	kill $$clock; wait $$clock 2>/dev/null; \
	[ $$code -ne 0 ] || say "$(VENV) is ready and holds $$(size)"; \
	exit $$code; }

$(VENV)/core: EXTRAS := [robots]
$(VENV)/core: SIZES := 0.5 GB to download and 1.7 GB on the disk
$(VENV)/dev: EXTRAS := [dev]
$(VENV)/dev: SIZES := 1.0 GB to download and 3.5 GB on the disk
$(VENV)/core $(VENV)/dev: INSTALL = $(PIP) install --constraint constraints.txt --editable '.$(EXTRAS)'
$(VENV)/core $(VENV)/dev: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(VENV) was made with a Python older than 3.11; remove it (make clean), then run make again" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null || { \
	    echo "$(VENV) has no pip and cannot get one; remove it (make clean), then run make again" >&2; exit 1; }
	@echo "installing mmsdk$(EXTRAS) into $(VENV): about $(SIZES) the first time (more where PyTorch comes with CUDA), some minutes"
	@{ if [ -t 1 ]; then $(INSTALL); else $(BRIEFLY); fi; } || { \
	    echo "Could not install into $(VENV), see above. Check the network, the space on the disk and your pip mirror or proxy (pip config list)," \
	        "then run make again: what was done is kept." >&2; exit 1; }
	@touch $(VENV)/core $@

# Types and import rules are checked on what a user would get: the installed tree, where every package has its import name.
build/check: $(VENV)/dev
	@rm -rf $(BUILT)
	@echo 'building $@, half a minute'
	@$(PIP) install -qq --no-deps --no-build-isolation --target $@ .
