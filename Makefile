# `make demo` and `make test` set up what they need; both are quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An environment with an NVIDIA driver gets the GPU packages.
FLAVOUR ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
# seqeval is built from source, and older pips fail at that without --use-pep517.
PIP := $(BIN)/pip install --disable-pip-version-check -q --use-pep517 -c constraints.txt

.PHONY: demo test test-all test-cuda check format documents site clean

# One command finds the fastest variant, from data and an allowed loss of accuracy. With the GPU packages, where the GPU can
# be used: on the processor and on the GPU, and both compared. Where it cannot, the run says why and continues on the processor.
# An earlier demo is moved away: with packages that have come since, it is another run.
DEMO := $(BIN)/enginesmith optimize digits --data digits --max-drop 0.01 --time 3m --replace
CUDA_USABLE := import json, sys; usable = [row["engine"] for row in json.load(sys.stdin) if row["usable"] == "yes"]; \
  sys.exit(usable[:1] != ["eager"] or len(usable) == 1)
demo: $(VENV)/.runtime-$(FLAVOUR)
ifeq ($(FLAVOUR),gpu)
	@if $(BIN)/enginesmith engines --device cuda --json | $(BIN)/python -c '$(CUDA_USABLE)'; then set -x; \
	  $(DEMO) --device cpu --out runs/demo && \
	  $(DEMO) --device cuda --out runs/demo-gpu && \
	  $(BIN)/enginesmith compare runs/demo runs/demo-gpu --any-device; \
	else \
	  $(DEMO) --out runs/demo; \
	fi
else
	$(DEMO) --out runs/demo
endif

# Two processes, each of which keeps a file's tests together: what they share is made once. Long files come first.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every capability once, on real parts; then what runs on a GPU, in one process: two would disturb each other's memory.
test: $(VENV)/.dev-$(FLAVOUR)
	CUDA_VISIBLE_DEVICES= $(PYTEST) -m "not thorough and not gpu"
	$(BIN)/pytest -n 0 -m gpu tests/gpu

# Everything: after the tests above, which `make test test-all` runs once, the thorough ones.
test-all: test
	CUDA_VISIBLE_DEVICES= $(PYTEST) -m "thorough and not gpu"

# The CUDA path without a device: torch and ONNX Runtime for CUDA on a runtime whose kernels do nothing (tests/cuda/README.md).
CUDA_VENV ?= .venv-cuda
test-cuda:
	PYTHON=$(PYTHON) CUDA_VENV=$(CUDA_VENV) tests/cuda/run.sh $(PYTEST_ARGUMENTS)

check: $(VENV)/.dev-$(FLAVOUR) build/enginesmith
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .  # a cached answer does not know of a module that has come since
	$(BIN)/mypy -p enginesmith.pipeline -p enginesmith.models -p enginesmith.calibration -m enginesmith -m enginesmith.cli
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev-$(FLAVOUR)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What is made from the code: the JSON Schemas of run.json and fleet.json, the options, the references of recipes and commands.
documents: $(VENV)/.dev-$(FLAVOUR)
	$(BIN)/python -c 'import json; from enginesmith.pipeline.results.run import json_schema; print(json.dumps(json_schema(), indent=1))' > pipeline/report/run.schema.json
	$(BIN)/python -c 'import json; from enginesmith.pipeline.results.fleet import json_schema; print(json.dumps(json_schema(), indent=1))' > pipeline/report/fleet.schema.json
	$(BIN)/python -c 'import json; from enginesmith.pipeline.recipe.cli_options import list_options; print(json.dumps(list_options(), indent=1, ensure_ascii=False))' > pipeline/commands/options.json
	$(BIN)/python docs/fields.py > docs/recipe.md
	$(BIN)/python docs/commands.py > docs/cli.md

# The documents as a site in build/site; a link that leads nowhere is an error.
site: $(VENV)/.dev-$(FLAVOUR)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean:
	rm -rf $(VENV) $(CUDA_VENV) build runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "enginesmith needs Python 3.11 or newer; name one with make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)

# Each flavour has stamps of its own. The other one's ONNX Runtime goes first: both have the same files, and the one that
# is removed later takes those of the other along.
ORT_cpu := onnxruntime
ORT_gpu := onnxruntime-gpu
# TensorRT-RTX has no target for compute capability 9.0 and 10.x; TensorRT's libraries come from NVIDIA's package index.
HOPPER_OR_B200 := nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qE '^(9|10)\.'
NO_TENSORRT := TensorRT could not be installed; this GPU has eager, compiled and ONNX Runtime (docs/gpu.md)
OTHER := $(if $(filter gpu,$(FLAVOUR)),cpu,gpu)
$(VENV)/.runtime-$(FLAVOUR): $(BIN)/python pyproject.toml constraints.txt
	if $(BIN)/pip show -q $(ORT_$(OTHER)) 2>/dev/null; then $(BIN)/pip uninstall -q -y onnxruntime onnxruntime-gpu; fi
	$(PIP) -e '.[$(FLAVOUR),openvino]'
ifeq ($(FLAVOUR),gpu)
	if $(HOPPER_OR_B200); then $(PIP) -e '.[gpu,tensorrt]' || echo "note: $(NO_TENSORRT)"; fi
endif
	rm -f $(VENV)/.runtime-$(OTHER) $(VENV)/.dev-$(OTHER)
	touch $@

$(VENV)/.dev-$(FLAVOUR): $(VENV)/.runtime-$(FLAVOUR)
	$(PIP) -e '.[$(FLAVOUR),dev]'
	touch $@

# mypy finds the folders of the checkout as the package that they are installed as.
build/enginesmith:
	mkdir -p build
	ln -sfn .. $@
