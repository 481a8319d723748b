# Two commands do everything: `make train` and `make test`. Each creates what it needs in .venv, and nothing else.

CONFIG ?= configs/quickstart.yaml
VENV := .venv
PY := $(VENV)/bin/python
# The version is asked of the interpreter itself: a name on the PATH may be a shim that cannot start.
CANDIDATES := python3.11 python3.12 python3 python3.13 python3.14 python
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
# pip must never choose a torch by itself, so this is the only install line, and it names the pins.
INSTALL := $(PY) -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# pip compiles 20,000 files to bytecode on one core. Here all cores do, without what few import; a file that only newer
# Pythons understand stays as it is.
COMPILE := $(PY) -m compileall -q -j 0 -x '/tests?/|/transformers/models/|/py312_' $(VENV)/lib

# Some images forbid bytecode: every process of a test would then compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train check test sweep browser chaos lint format types layers mutants rehearse docs dist clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

train: $(VENV)/.installed-plot  ## train configs/quickstart.yaml (or CONFIG=...) on the embedded corpus
	$(VENV)/bin/nsa train --config $(CONFIG)

# Every path equals the oracle; nothing reads the future; configs; a resumed run is exact.
CHECKED := $(patsubst %,nsa/tests/%.py,test_equiv_small test_masks ops/test_paths ops/test_causality config/test_config) \
  nsa/tests/train/test_resume.py::test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit

check: lint  ## lint and the tests of the first promises, in under a minute
	$(PY) -m pytest -n 2 --timeout 60 -q $(CHECKED) -k "not bit_for_bit or plain"

test: $(VENV)/.installed-dev  ## run the CPU test suite
	$(PY) -m pytest -n 2 --dist worksteal --timeout 600 -m "not gpu and not browser and not chaos and not rehearsal and not wheel and not slow"

sweep: $(VENV)/.installed-dev  ## compile every shape for every GPU; slow
	$(PY) -m pytest -n 2 --timeout 7200 -m "slow and not gpu"

browser: $(VENV)/.installed-browser  ## test the dashboard in Chromium, which is installed by apt where that can be
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends chromium fonts-dejavu-core; } \
	  || { echo "make browser: no Chromium here, and apt cannot install it; install chromium and repeat" >&2; exit 2; }
	$(PY) -m pytest --timeout 300 -m browser nsa/tests/web/test_dashboard_browser.py

chaos: $(VENV)/.installed-dev  ## break two real ranks in many ways and see that the promises hold
	$(PY) -m pytest --timeout 300 -m chaos nsa/tests/distributed/test_chaos.py

lint: $(VENV)/.installed-dev  ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.installed-dev  ## format the code and fix what ruff can fix
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

types: $(VENV)/.installed-dev  ## check the types
	$(VENV)/bin/mypy nsa studies

layers: $(VENV)/.installed-dev  ## check that imports follow the layers of the package
	$(VENV)/bin/lint-imports

mutants: $(VENV)/.installed-dev  ## plant known bugs in turn and show that the tests catch each
	$(PY) scripts/mutants.py

rehearse: $(VENV)/.installed-dev  ## run every command of the runbooks for real, small, on the CPU
	$(PY) -m pytest -n 2 --dist loadscope --timeout 600 -v -m rehearsal nsa/tests/repository/test_rehearsal.py

# Warnings are errors: a broken link, a page that is not in the navigation. The variable silences a notice of the theme.
docs: $(VENV)/.installed-docs  ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

dist: $(VENV)/.installed-dev  ## build wheel and sdist, and use the wheel in a new environment outside the clone
	rm -rf dist
	$(PY) -m build --no-isolation --outdir dist .
	$(PY) -m pytest --timeout 600 -m wheel nsa/tests/repository/test_wheel.py

clean:  ## remove the environment, build output and caches (what runs wrote under artifacts/ stays)
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that came from another machine, or whose python is gone, cannot start: it goes before make looks at its stamps.
ifneq ($(shell $(PY) -c 'print("works")' 2>/dev/null),works)
$(shell rm -rf $(VENV))
endif

$(PY):
	@for candidate in $(CANDIDATES); do \
	  if $$candidate -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$($$candidate --version)"; \
	    exec $$candidate -m venv $(VENV); \
	  fi; \
	done; \
	echo "make: no Python 3.11 or newer with the venv module among: $(CANDIDATES); install one (Debian: apt install python3 python3-venv)" >&2; exit 2

# All that CI needs, by one call of pip.
$(VENV)/.installed-ci: pyproject.toml constraints.txt | $(PY)
	$(INSTALL) -e '.[dev,docs,browser]'
	-$(COMPILE)
	@touch $@ $(foreach extra,dev docs browser,$(VENV)/.installed-$(extra))

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(PY)
	@echo "installing nsa[$*] into $(VENV)"
	$(INSTALL) -e '.[$*]'
	-$(COMPILE)
	@touch $@
