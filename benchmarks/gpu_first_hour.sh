#!/usr/bin/env bash
# The first hour on a GPU (docs/gpu.md): what the doctor says, the tests that need a GPU, the cases of tests/cuda on the
# real device, six models in all engines, and NVIDIA's and ONNX Runtime's own timers beside them where they are installed.
#
#   benchmarks/gpu_first_hour.sh [OUT]
#
# OUT/gpu_first_hour.json has everything; a part that cannot run here says why, and the others go on. Without a GPU all of
# them do. Settings in the environment: ENGINESMITH (its bin folder, .venv/bin by default), MODELS, ENGINES, MINUTES for
# each part, MEASURE_TIME for each batch size; those of benchmarks/gpu_lane.sh, which does the tests and the models.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/build/gpu_first_hour}
mkdir -p "$out"
out=$(cd "$out" && pwd)
bin=${ENGINESMITH:-$root/.venv/bin}
models=${MODELS:-digits resnet18 resnet50 mobilenet_v2 bert_base vit_b16}
minutes=${MINUTES:-9}
notes=$out/parts.tsv
: > "$notes"
cd "$root"

say() {
    printf '%s\t%s\n' "$1" "$2" >> "$notes"
    echo "$1: $2"
}
within() { timeout --kill-after=10 "${minutes}m" "$@"; }

usable=$("$bin/enginesmith" engines --device cuda --json 2>/dev/null > "$out/engines.json" && "$bin/python" -c '
import json, sys
rows = json.load(open(sys.argv[1]))
print(*(row["engine"] for row in rows if row["usable"] == "yes" and rows[0]["usable"] == "yes"))' "$out/engines.json")
why=$("$bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[0]["reason"])' "$out/engines.json" 2>/dev/null)
engines=${ENGINES:-$usable}

if within "$bin/enginesmith" doctor --json > "$out/doctor.json" 2> "$out/doctor.log"; then
    say doctor "done"
else
    say doctor "failed: see doctor.log"
fi

if [ -z "$usable" ]; then
    say tests "skipped: $why"
    say lane "skipped: $why"
else
    PATH=$bin:$PATH MINUTES=$minutes within benchmarks/gpu_lane.sh "$root/wheels" "$out" "tests tensorrt $models" > "$out/gpu_lane.log" 2>&1
    say tests "exit code $?: gpu_lane.json, gpu_lane.log"
    # without the runtime underneath, its tests use the real driver
    ENGINESMITH_STAND_IN=real within "$bin/pytest" tests/cuda -q -n 0 -k "device or memory or onnxruntime or products" -rs > "$out/lane.log" 2>&1
    say lane "exit code $?: lane.log; cases that set the card or make faults are skipped"
fi

for model in $models; do
    folder=$out/runs/$model
    if [ -z "$usable" ]; then
        say "$model" "skipped: $why"
        continue
    fi
    words=()
    for engine in $engines; do
        [ "$engine" = eager ] || words+=(--engine "$engine")
    done
    within "$bin/enginesmith" optimize "$model" --device cuda "${words[@]}" --precision fp32 --precision fp16 \
        --measure-time "${MEASURE_TIME:-15s}" --out "$folder" > "$out/$model.log" 2>&1
    say "$model" "exit code $?: runs/$model/run.json"
done

# The vendors' timers on the same files: within 3 % of ours, or one of them is wrong.
for model in $models; do
    plan=$(find "$out/runs/$model" -name '*.engine' -o -name '*.plan' 2>/dev/null | head -n 1)
    graph=$(find "$out/runs/$model" -name '*.onnx' 2>/dev/null | head -n 1)
    if ! command -v trtexec >/dev/null; then
        say "$model trtexec" "skipped: trtexec is not installed"
    elif [ -z "$plan" ]; then
        say "$model trtexec" "skipped: no TensorRT engine was built"
    else
        within trtexec --loadEngine="$plan" --useCudaGraph --useSpinWait --noDataTransfers > "$out/$model.trtexec.log" 2>&1
        say "$model trtexec" "exit code $?: $(grep -m 1 'GPU Compute Time' "$out/$model.trtexec.log")"
    fi
    if ! command -v onnxruntime_perf_test >/dev/null; then
        say "$model onnxruntime_perf_test" "skipped: onnxruntime_perf_test is not installed"
    elif [ -z "$graph" ]; then
        say "$model onnxruntime_perf_test" "skipped: no graph for ONNX Runtime was built"
    else
        within onnxruntime_perf_test -e cuda -I -t 10 "$graph" > "$out/$model.perf_test.log" 2>&1
        say "$model onnxruntime_perf_test" "exit code $?: $(grep -m 1 'Average inference time' "$out/$model.perf_test.log")"
    fi
done

"$bin/python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path


def read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


out = Path(sys.argv[1])
parts = [line.split("\t", 1) for line in (out / "parts.tsv").read_text().splitlines()]
runs = {path.parent.name: read(path) for path in sorted(out.glob("runs/*/run.json"))}
files = {name: read(out / f"{name}.json") for name in ("doctor", "engines", "gpu_lane")}
(out / "gpu_first_hour.json").write_text(json.dumps({"parts": dict(parts), **files, "runs": runs}, indent=1))
print(out / "gpu_first_hour.json")
PYTHON
