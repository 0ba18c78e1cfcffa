#!/usr/bin/env bash
# Everything that needs a CUDA device, on a bare machine: Python 3.12 with torch (CUDA), onnx, onnxruntime, numpy and pytest,
# no network, and wheels in a folder for what is missing.
#
#   benchmarks/gpu_lane.sh [WHEELS] [OUT]      writes OUT/gpu_tests.json and OUT/gpu_<model>.json
#
# Wheels too large to carry whole may lie there in parts: NAME.whl.part00, NAME.whl.part01, …
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=${1:-$root/wheels}
out=${2:-$root/benchmarks/results}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for first in "$wheels"/*.part00; do
    [ -e "$first" ] && cat "${first%00}"* > "$work/$(basename "${first%.part00}")"
done
for folder in "$wheels" "$work"; do
    ls "$folder"/*.whl >/dev/null 2>&1 && python3 -m pip install -q --no-index --no-deps --target "$work/site" "$folder"/*.whl
done

# The checkout is the package; nothing is installed from it.
ln -s "$root" "$work/enginesmith"
export PYTHONPATH="$work:$work/site${PYTHONPATH:+:$PYTHONPATH}"
export ENGINESMITH_STORE="$work/store"
cd "$root"

python3 -m pytest tests/gpu -m gpu -q -p no:cacheprovider -o addopts="--import-mode=importlib" -o timeout= \
    --junitxml="$work/junit.xml"
tests=$?
python3 - "$work/junit.xml" "$tests" > "$out/gpu_tests.json" <<'PY'
import json, sys, xml.etree.ElementTree as tree
cases = [
    {"test": case.get("name"), "seconds": float(case.get("time")), "result": next((part.tag for part in case), "passed"),
     "why": next((part.get("message") for part in case), "")}
    for case in tree.parse(sys.argv[1]).iter("testcase")
]
print(json.dumps({"exit": int(sys.argv[2]), "cases": cases}, indent=1))
PY
for model in resnet50 bert_base vit_b16; do
    python3 -m enginesmith.cli optimize "$model" --device cuda --batch 1,8,64 --engine onnxruntime --engine compiled \
        --min-sqnr 40 --measure-time 20s --out "$work/$model" --json > "$out/gpu_$model.json" ||
        echo "{\"failed\": $?}" > "$out/gpu_$model.json"
done
exit $tests
