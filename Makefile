# Two commands matter: `make quickstart` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
LOWEST := .venv-lowest
NEWEST := .venv-newest
BIN := $(VENV)/bin
# pip would compile every file of every package, one after another; Python compiles what is imported, and keeps it.
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=

# Tests run in as many processes as there are cores, four at most, each with one thread of torch.
WORKERS := OMP_NUM_THREADS=1
FAST := -n auto --maxprocesses 4 --dist loadfile --durations=25 -m "not slow and not gpu and not engine"

.PHONY: quickstart demo test fast test-slow test-gpu test-engines test-lowest test-newest lint format docs clean

quickstart: $(VENV)/.installed
	$(BIN)/draftsmith quickstart
	@echo "These commands run in a shell after: source $(BIN)/activate"

# A page at http://127.0.0.1:7860 with the quickstart's drafter, which is trained first where there is none.
demo: $(VENV)/.installed
	$(PIP) --editable ".[demo]"
	test -d runs/quickstart/mtp/drafter || $(BIN)/draftsmith quickstart
	$(BIN)/draftsmith demo --target embedded --drafter hybrid:drafter=runs/quickstart/mtp/drafter

# Lint and documentation beside the first tests.
test: $(VENV)/.installed-dev
	$(MAKE) --jobs=3 fast lint docs

fast: $(VENV)/.installed-dev
	$(WORKERS) $(BIN)/pytest $(FAST)

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow

test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m gpu tests/gpu

# Engines that are installed: docs/guide/serve.md says how.
test-engines: $(VENV)/.installed-dev
	$(BIN)/pytest -m engine tests/engines

test-lowest: $(LOWEST)/.installed
	$(WORKERS) $(LOWEST)/bin/python -m pytest $(FAST)

# Without constraints.txt: what `pip install draftsmith` gets today. It is installed anew each time.
test-newest:
	@echo "Installing the newest releases of every dependency into $(NEWEST)"
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/pip --disable-pip-version-check install --quiet --no-compile --editable ".[dev]"
	$(WORKERS) $(NEWEST)/bin/python -m pytest $(FAST)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site in site/, with an API reference from the docstrings. A dead link fails.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing draftsmith and what it needs into $(VENV) (a few minutes on a new machine)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing draftsmith with its development tools into $(VENV) (a few minutes on a new machine)"
	$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/.installed

# Every dependency at the lower bound that pyproject.toml declares. What those need in turn is the newest that fits.
$(LOWEST)/.installed: pyproject.toml
	@echo "Installing the lower bounds of every dependency into $(LOWEST)"
	$(PYTHON) -m venv --clear $(LOWEST)
	$(PYTHON) tests/lower_bounds.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip --disable-pip-version-check install --quiet --no-compile --constraint $(LOWEST)/constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) runs build dist site *.egg-info
	@cache="$${DRAFTSMITH_CACHE:-$$HOME/.cache/draftsmith}"; test ! -d "$$cache" || \
	  echo "Kept: $$(du -sh "$$cache" | cut -f1) of sampled responses and built targets in $$cache; rm -r it to sample anew"
