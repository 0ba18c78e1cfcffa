#!/usr/bin/env bash
# Everything that needs a CUDA device, on a bare machine: Python 3.12 with torch (CUDA), onnx, onnxruntime, numpy and pytest,
# no network, and wheels in a folder for what is missing.
#
#   benchmarks/gpu_lane.sh [WHEELS] [OUT] [PARTS]
#
# PARTS are words of "tests tensorrt models", all by default: the parts of a lane that one call has no time for.
#   tests      tests/gpu                                             → OUT/gpu_tests.json
#   tensorrt   benchmarks/gpu/lane.py, what TensorRT does here        → OUT/gpu_tensorrt.json
#   models     the main job with ONNX Runtime and torch.compile       → OUT/gpu_<model>.json
# Wheels too large to carry whole may lie there in parts: NAME.whl.part00, NAME.whl.part01, …
# Without a device each part says that it is skipped, and writes so. The exit code is that of the tests.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=${1:-$root/wheels}
out=${2:-$root/benchmarks/results}
parts=${3:-tests tensorrt models}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(command -v python3)

for first in "$wheels"/*.part00; do
    [ -e "$first" ] && cat "${first%00}"* > "$work/$(basename "${first%.part00}")"
done
for folder in "$wheels" "$work"; do
    ls "$folder"/*.whl >/dev/null 2>&1 || continue
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$work/site" "$folder"/*.whl ||
        echo "some wheels of $folder were not installed: what needs them is skipped"
done

# The checkout is the package; nothing is installed from it.
ln -s "$root" "$work/enginesmith"
export PYTHONPATH="$work:$work/site${PYTHONPATH:+:$PYTHONPATH}"
export ENGINESMITH_STORE="$work/store"
cd "$root"

wants() { case " $parts " in *" $1 "*) ;; *) return 1 ;; esac }
device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
echo "device: ${device:-none}"

tests=0
if wants tests; then
    "$python" -m pytest tests/gpu -m gpu -q -rs -p no:cacheprovider --import-mode=importlib -o addopts= -o timeout= \
        -W ignore::pytest.PytestConfigWarning --junitxml="$work/junit.xml"
    tests=$?
    "$python" - "$work/junit.xml" "$tests" > "$out/gpu_tests.json" <<'PY'
import json, pathlib, sys, xml.etree.ElementTree as tree

def outcome(case):
    part = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
    found = {"test": case.get("name"), "seconds": float(case.get("time")), "result": "passed" if part is None else part.tag}
    return found if part is None else found | {"why": part.get("message")}

path = pathlib.Path(sys.argv[1])
cases = [outcome(case) for case in tree.parse(path).iter("testcase")] if path.is_file() else []
print(json.dumps({"exit": int(sys.argv[2]), "cases": cases}, indent=1))
PY
fi

if wants tensorrt; then
    "$python" benchmarks/gpu/lane.py --models digits resnet50 --out "$out/gpu_tensorrt.json"
fi

if wants models; then
    for model in resnet50 bert_base vit_b16; do
        if [ -z "$device" ]; then
            echo "$model skipped: no CUDA device"
            echo '{"skipped": "no CUDA device"}' > "$out/gpu_$model.json"
            continue
        fi
        "$python" -m enginesmith.cli optimize "$model" --device cuda --batch 1,8,64 --engine onnxruntime --engine compiled \
            --min-sqnr 40 --measure-time 20s --out "$work/$model" --json > "$out/gpu_$model.json" ||
            echo "$model: exit code $?"
        [ -s "$out/gpu_$model.json" ] || echo '{"failed": "no document"}' > "$out/gpu_$model.json"
    done
fi
exit $tests
