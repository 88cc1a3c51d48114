# make demo | quick | test | thorough | check | docs | bench | dist: each makes .venv on its first call and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests start many programs: without stored byte code each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test thorough check format docs bench dist clean
.DEFAULT_GOAL := demo

# One stamp per set of extras: a change of the pins or of the project file installs again.
$(VENV)/.%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$*]"
	@touch $@

demo: $(VENV)/.cli
	$(BIN)/sensli demo

# What needs no other process, browser, compiler or library, but for the slow ones. What is ignored is not even imported.
quick: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not process and not library and not slow and not thorough" --ignore tests/integrations \
	  --ignore tests/lab/paper/test_ray.py --ignore-glob "*/test_fsdp*" -n auto --dist worksteal

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not thorough" -n auto --dist worksteal

# What `make test` leaves out, because it costs much and has a quicker relative there.
thorough: $(VENV)/.dev
	$(BIN)/python -m pytest -m thorough -n auto --dist worksteal

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Not --quiet: that silences the warnings that --strict counts.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: thorough
	$(BIN)/python -m benchmarks

# Wheel and source archive, built by the pinned hatchling.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
