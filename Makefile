# Every target works on a fresh checkout: it sets up .venv first, and again when its pins change.
# PYTHON=python3.12 chooses the interpreter, WORKERS=8 the number of test processes.
WORKERS ?= 2
PY = .venv/bin/python
STAMP = .venv/.installed

.PHONY: help setup run test check bench gpu clean

help:
	@echo "make run     fine-tune recipes/smoke.yaml here and show where bytes and milliseconds went"
	@echo "make test    the whole test suite: no GPU, no network"
	@echo "make check   lint, format, types, size of the code"
	@echo "make bench   benchmarks"
	@echo "make gpu     the tests that need an NVIDIA GPU"
	@echo "make setup   .venv with the versions in constraints.txt (the others do this by themselves)"
	@echo "make clean   remove .venv"

setup: $(STAMP)

run: $(STAMP)
	$(PY) -m harness run smoke

# One thread a process: two test processes with two threads each are slower than either alone.
test: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS)

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	@wc -l harness/*.py | sort -n | tail -4

bench: $(STAMP)
	$(PY) -m benchmarks.overhead
	$(PY) -m benchmarks.allocator

gpu: $(STAMP)
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu: PyTorch " \
	+ torch.__version__ + " sees no NVIDIA GPU. Run it on a Linux machine where nvidia-smi lists one.")'
	$(PY) -m pytest -m gpu

clean:
	rm -rf .venv

# python3 first: it is the one the user chose. A candidate must be new enough and able to make a venv.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(PY) -c '' 2>/dev/null; then \
	    rm -rf .venv; \
	    for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	        if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	        then found=$$python; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "make: found no Python 3.11 or newer with the venv module. Install one (Debian, Ubuntu:" >&2; \
	        echo "apt install python3 python3-venv; macOS: brew install python), or name it: make PYTHON=/path" >&2; \
	        exit 1; \
	    fi; \
	    echo "making .venv with $$found"; \
	    $$found -m venv .venv; \
	fi
	$(PY) -m pip install -c constraints.txt -e '.[dev,liger]'
	@touch $@
