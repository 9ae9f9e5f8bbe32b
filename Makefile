# Every target works on a fresh checkout: it sets up .venv first, and again when its pins change.
# PYTHON=python3.12 chooses the interpreter, WORKERS=8 the number of test processes. PY=python3 runs with an
# interpreter that has everything already, and sets nothing up: for a machine without a network.
WORKERS ?= 2
STAMP = .venv/.installed
ifneq ($(filter command environment,$(firstword $(origin PY))),)
READY =
else
PY = .venv/bin/python
READY = $(STAMP)
endif
GPU_RUN = profiles/runs/gpu
# PyTorch's CUDA build, beside a .venv that may hold the CPU build
VIRTUAL = .venv-virtual-gpu
VIRTUAL_STAMP = $(VIRTUAL)/.installed
# Programs whose libraries the others there would not bear
OTHERS = $(VIRTUAL)/others
OTHERS_LIST = tests/virtual_gpu/programs/others.txt
OTHERS_STAMP = $(OTHERS)/.installed

# The releases at the two ends of what pyproject.toml allows, each in an environment of its own
WINDOW = oldest newest

.PHONY: help setup run test test-fast test-long check bench docs site pages trust fuzz soak mutate gpu virtual-gpu virtual-gpu-all causal-models window clean

help:
	@echo "make run     fine-tune recipes/smoke.yaml here and show where bytes and milliseconds went"
	@echo "make test    the test suite: no GPU, no network, six to nine minutes on two cores"
	@echo "make test-long  the long tests: killing, full disks, hostile files, a browser, ranks, trackers"
	@echo "make test-fast  its quick half, in one process: after a change, before the whole suite"
	@echo "make check   lint, format, types, size of the code"
	@echo "make bench   benchmarks"
	@echo "make docs    the guide as web pages in build/site, with its pictures and links checked"
	@echo "make site    the page that asks, as files for any web server, in build/site/ask (fetches Pyodide once)"
	@echo "make pages   every generated table, page and picture, from committed results (CHECK=--check compares)"
	@echo "make trust   kill, fill the disk, feed hostile files, thousands of times; writes docs/trust.md"
	@echo "             from what happened (half an hour)"
	@echo "make fuzz    30,000 broken and hostile inputs (a quarter of an hour)"
	@echo "make mutate  changes the code, one place at a time, and looks whether a test fails; writes"
	@echo "             docs/mutation.md from what happened (long; MODULES=\"fit step\" tries some modules)"
	@echo "make soak    2,000 steps: memory flat, log complete, time flat (five minutes on an idle machine)"
	@echo "make gpu     on a machine with an NVIDIA GPU: measure everything (under an hour), bring it into"
	@echo "             profiles/, and run the tests that need a GPU; PY=python3 where there is no network"
	@echo "make virtual-gpu  the tests that need PyTorch's CUDA build and no GPU, in .venv-virtual-gpu (Linux;"
	@echo "             some GB to download the first time, then a few minutes)"
	@echo "make virtual-gpu-all  with the slow ones too: all programs of others, recordings made anew"
	@echo "make causal-models  every type of causal language model, simulated against the virtual GPU (half an hour)"
	@echo "make window  the whole test suite with the oldest and with the newest releases of tests/window/, in"
	@echo "             .venv-oldest and .venv-newest; writes profiles/cpu/window.json (some GB to download)"
	@echo "make setup   .venv with the versions in constraints.txt (the others do this by themselves)"
	@echo "make clean   remove .venv and the other environments"

setup: $(STAMP)

run: $(READY)
	$(PY) -m harness run smoke

# One thread a process: two test processes with two threads each are slower than either alone. Bytecode is kept,
# whatever the user's shell says: without it every test process compiles all tests anew, for 7 seconds.
SURROUNDINGS = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# A file stays in one process: what its tests share (a simulation, a model, a browser, processes of ranks) is made once.
# Files come in the order of tests/conftest.py: otherwise those with few tests come last, and they are the longest.
PYTEST = $(SURROUNDINGS) $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(READY)
	$(PYTEST) -m "not gpu and not virtual_gpu and not long"

# Killing, filling the disk, hostile files, a browser, ranks and trackers in processes (tests/conftest.py). PART=1/4
# runs the first of every four, of `make virtual-gpu` too.
test-long: $(READY)
	$(PYTEST) -m "not gpu and not virtual_gpu and long" $(PART:%=--part %)

# One recording a device and toggle set, no browser, no killing, no processes of their own (tests/conftest.py).
test-fast: $(READY)
	$(PYTEST) -m "not slow and not gpu and not virtual_gpu"

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -c "from importlinter.cli import lint_imports_command as lint; lint()"
	$(PY) -m pyright --pythonpath $(PY)
	@git ls-files 'harness/*.py' | xargs wc -l | tail -1

bench: $(READY)
	$(PY) -m benchmarks.speed.overhead
	$(PY) -m benchmarks.speed.watch
	$(PY) -m benchmarks.speed.allocator
	$(PY) -m benchmarks.speed.report
	$(PY) -m benchmarks.speed.startup
	$(PY) -m benchmarks.speed.ask
	$(PY) -m benchmarks.speed.simulate
	$(PY) -m benchmarks.speed.ranks

# Each is a module that writes its part from committed results, and with --check fails if it is not so.
PAGES = pictures readme profiles time toggle_reads map formula trust mutation watched virtual_gpu causal_models profiles.cards several_gpus window questions ask.guide

pages: $(READY)
	@for page in $(PAGES); do echo "pages.$$page"; $(PY) -m pages.$$page $(CHECK) || exit 1; done

docs: pages
	$(PY) -m pages.links
	$(PY) -m mkdocs build --strict --quiet
	$(PY) -m pages.ask.site build/site/ask

site: $(READY)
	$(PY) -m pages.ask.site build/site/ask

TRUST_PAGE = tests/trust/test_page.py
TRUST_TESTS = tests/snapshot/test_safe_read.py $(filter-out $(TRUST_PAGE),$(wildcard tests/trust/test_*.py)) \
	tests/launch/test_ranks.py::test_a_rank_that_is_killed_ends_all_and_what_they_knew_is_kept
FUZZ = 1300

# One process: what was tried is gathered there. The page's own test comes after the page.
trust: $(READY)
	KILLS=51 FUZZ=$(FUZZ) $(PY) -m pytest $(TRUST_TESTS) --trust-json docs/trust.json
	$(PY) -m pages.trust
	$(PY) -m pytest $(TRUST_PAGE)

fuzz: $(READY)
	FUZZ=$(FUZZ) $(PY) -m pytest -n $(WORKERS) $(wildcard tests/trust/test_fuzz*.py)

# The tool is wanted here alone. In one process: two cores do not make the forks faster than the tests need.
mutate: $(READY)
	@$(PY) -c 'import mutmut' 2>/dev/null || $(PY) -m pip install -c constraints.txt -e '.[mutate]'
	$(SURROUNDINGS) PYTHONPATH=$(CURDIR) $(PY) -m tests.mutation $(MODULES)
	$(PY) -m pages.mutation

soak: $(READY)
	$(PY) -m benchmarks.soak --out profiles/cpu/soak.json

# The measuring comes first: a test that fails must not cost it.
gpu: $(READY)
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu: PyTorch " \
	+ torch.__version__ + " sees no NVIDIA GPU. Run it on a Linux machine where nvidia-smi lists one.")'
	$(PY) -m benchmarks.gpu_programme --all --out $(GPU_RUN)
	$(PY) -m benchmarks.gpu_programme.import_results $(GPU_RUN)
	$(PY) -m pages.profiles
	$(PY) -m pytest -m gpu

virtual-gpu: CHOSEN = virtual_gpu and not slow
virtual-gpu-all: CHOSEN = virtual_gpu
virtual-gpu-all: $(OTHERS_STAMP)
virtual-gpu virtual-gpu-all: $(VIRTUAL_STAMP)
	$(SURROUNDINGS) PROGRAMS_OF_OTHERS=$(CURDIR)/$(OTHERS) $(VIRTUAL)/bin/python -m pytest -n $(WORKERS) -m '$(CHOSEN)' $(PART:%=--part %) tests/virtual_gpu

# Half an hour; what the file has of the same versions is kept.
causal-models: $(VIRTUAL_STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VIRTUAL)/bin/python -m benchmarks.causal_models --out profiles/cpu/causal_models.json
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VIRTUAL)/bin/python -m benchmarks.causal_models --methods --out profiles/cpu/methods.json
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VIRTUAL)/bin/python -m benchmarks.causal_models --vision --out profiles/cpu/vision_models.json
	$(PY) -m pages.causal_models

# Both are run, whatever fails in the first.
window: $(READY) $(WINDOW:%=.venv-%/.installed)
	@status=0; for end in $(WINDOW); do \
	    $(PY) -m benchmarks.window $$end --python .venv-$$end/bin/python --workers $(WORKERS) || status=1; \
	done; $(PY) -m pages.window; exit $$status

clean:
	rm -rf .venv $(VIRTUAL) $(WINDOW:%=.venv-%)

# python3 first: it is the one the user chose. A candidate must be new enough and able to make a venv.
define make_environment
	@if ! $(1)/bin/python -c '' 2>/dev/null; then \
	    rm -rf $(1); \
	    for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	        if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	        then found=$$python; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "make: found no Python 3.11 or newer with the venv module. Install one (Debian, Ubuntu:" >&2; \
	        echo "apt install python3 python3-venv; macOS: brew install python), or name it: make PYTHON=/path" >&2; \
	        exit 1; \
	    fi; \
	    echo "making $(1) with $$found"; \
	    $$found -m venv $(1); \
	fi
endef

$(STAMP): pyproject.toml constraints.txt
	$(call make_environment,.venv)
	$(PY) -m pip install -c constraints.txt -e '.[dev,apollo,docs,galore,liger,loops,mcp,schedule-free,submitit,trackers]'
	@touch $@

$(OTHERS_STAMP): $(VIRTUAL_STAMP) $(OTHERS_LIST)
	rm -rf $(OTHERS)
	$(VIRTUAL)/bin/python -m pip install --no-deps --target $(OTHERS) -r $(OTHERS_LIST)
	@touch $@

# torch === takes the build without a local label, which is the CUDA build; constraints.txt takes either.
$(VIRTUAL_STAMP): pyproject.toml constraints.txt
	$(call make_environment,$(VIRTUAL))
	$(VIRTUAL)/bin/python -m pip install -c constraints.txt "$$(sed -n 's/^torch==/torch===/p' constraints.txt)"
	$(VIRTUAL)/bin/python -m pip install -c constraints.txt -e '.[dev,apollo,data,galore,liger,schedule-free,virtual-gpu]'
	@touch $@

# Of a name in both lists, the first list's release holds.
.venv-%/.installed: tests/window/%.txt pyproject.toml constraints.txt
	$(call make_environment,.venv-$*)
	awk -F== '!seen[$$1]++' tests/window/$*.txt constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install -c .venv-$*/constraints.txt -e '.[dev,apollo,docs,galore,liger,loops,mcp,schedule-free,submitit,trackers]'
	@touch $@
