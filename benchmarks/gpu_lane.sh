#!/usr/bin/env bash
# Everything that needs a CUDA device, on a bare machine: Python 3.12 with torch (CUDA), onnx, onnxruntime, numpy and pytest,
# no network, and wheels in a folder for what is missing.
#
#   benchmarks/gpu_lane.sh [WHEELS] [OUT] [PARTS]
#
# All of it is one file, OUT/gpu_lane.json; what another part left there stays. PARTS are the parts that one call has the
# time for, all by default:
#   tests       tests/gpu, and the cases of tests/cuda that need no simulated runtime
#   commands    benchmarks/gpu/commands.py: the doctor, a search, two models in all engines, bundles, the vendors' timers
#   tensorrt    benchmarks/gpu/lane.py: what TensorRT does here
#   resnet50 bert_base vit_b16 (or another model): benchmarks/gpu/bench.py: latency and memory of eager in float32, TF32,
#               float16 and bfloat16, compiled, CUDA graphs, ONNX Runtime and the flavours of TensorRT that load
# A part is cut off after MINUTES (9), and what it has by then is in the file; one marked "complete": false was cut off.
# Files of several calls are put together by `python benchmarks/gpu/record.py merge FILE... --out gpu_lane.json`.
# DEVICE=cpu BATCH="1 2" SECONDS_EACH=1 is a dry run of models on the CPU.
# Wheels too large to carry whole may lie there in parts: NAME.whl.part00, NAME.whl.part01, …
# benchmarks/gpu/smaller_wheel.py makes a wheel small enough to carry.
# Without a device each part says that it is skipped, and writes so. The exit code is that of the tests.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=${1:-$root/wheels}
out=${2:-$root/benchmarks/results}
parts=${3:-tests commands tensorrt resnet50 bert_base vit_b16}
minutes=${MINUTES:-9}
mkdir -p "$out"
record=$(cd "$out" && pwd)/gpu_lane.json
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
export ENGINESMITH_STORE="${ENGINESMITH_STORE:-$work/store}"
cd "$root"

# Ends a part a little after its own limit, with all that it started.
within() { timeout --kill-after=10 "$(awk "BEGIN { print int($minutes * 60) + 20 }")" "$@"; }

device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
echo "device: ${device:-none}"

without_simulation=
[ -z "$device" ] || without_simulation=$(printf 'tests/cuda/test_%s.py ' device memory onnxruntime products variants)
tests=0
for part in $parts; do
    case $part in
    tests)
        # shellcheck disable=SC2086
        ENGINESMITH_STAND_IN=real within "$python" -m pytest tests/gpu $without_simulation -q -rs -p no:cacheprovider --import-mode=importlib -o addopts= -o timeout= \
            -W ignore::pytest.PytestConfigWarning --junitxml="$work/junit.xml"
        tests=$?
        "$python" benchmarks/gpu/record.py tests "$work/junit.xml" "$tests" --out "$record"
        ;;
    commands)
        within "$python" benchmarks/gpu/commands.py --models resnet18 bert_base --out "$record"
        ;;
    tensorrt)
        within "$python" benchmarks/gpu/lane.py --models digits resnet50 --out "$record"
        ;;
    *)
        # shellcheck disable=SC2086
        within "$python" benchmarks/gpu/bench.py "$part" --out "$record" --device "${DEVICE:-cuda}" --batch ${BATCH:-1 8 64} \
            --seconds "${SECONDS_EACH:-15}" --minutes "$minutes" --jobs "${JOBS:-4}" || echo "$part: exit code $?"
        ;;
    esac
done
exit $tests
