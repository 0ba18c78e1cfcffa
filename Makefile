# `make demo` and `make test` set up what they need; both are quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An environment with an NVIDIA driver gets the GPU packages.
FLAVOUR ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
PIP := $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo test test-all check format documents site clean

demo: $(VENV)/.runtime
	$(BIN)/enginesmith optimize digits --precision fp32 --precision int8 --max-drop 0.01 --out runs/demo

# Two processes, each of which keeps a file's tests together: what they share is made once. Long files come first.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every capability once, on real parts.
test: $(VENV)/.dev
	$(PYTEST) -m "not thorough"

# Everything: after the tests above, which `make test test-all` runs once, the thorough ones.
test-all: test
	$(PYTEST) -m thorough

check: $(VENV)/.dev build/enginesmith
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p enginesmith.pipeline -p enginesmith.models -p enginesmith.calibration -m enginesmith.cli
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What is made from the code: the JSON Schemas of run.json and fleet.json, the options, the references of recipes and commands.
documents: $(VENV)/.dev
	$(BIN)/python -c 'import json; from enginesmith.pipeline.results.run import json_schema; print(json.dumps(json_schema(), indent=1))' > pipeline/report/run.schema.json
	$(BIN)/python -c 'import json; from enginesmith.pipeline.results.fleet import json_schema; print(json.dumps(json_schema(), indent=1))' > pipeline/report/fleet.schema.json
	$(BIN)/python -c 'import json; from enginesmith.pipeline.recipe.cli_options import list_options; print(json.dumps(list_options(), indent=1, ensure_ascii=False))' > pipeline/commands/options.json
	$(BIN)/python -c 'from enginesmith.pipeline.report.reference import recipe_reference; print(recipe_reference(), end="")' > docs/recipe.md
	$(BIN)/python docs/commands.py > docs/cli.md

# The documents as a site in build/site; a link that leads nowhere is an error.
site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean:
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "enginesmith needs Python 3.11 or newer; name one with make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[$(FLAVOUR)]'
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -e '.[$(FLAVOUR),dev]'
	touch $@

# mypy finds the folders of the checkout as the package that they are installed as.
build/enginesmith:
	mkdir -p build
	ln -sfn .. $@
