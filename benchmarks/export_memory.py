"""Peak memory that export adds over the loaded model, as a share of the weights' bytes.

    python benchmarks/export_memory.py [MODEL …]

Each model is exported in a process of its own, with the resident high-water mark reset after loading. The target is 1.0
for models above 400 MB. Writes results/export_memory.json.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

MEASURED = """
import json, re, sys, tempfile
from pathlib import Path
from enginesmith.pipeline.frameworks import source
from enginesmith.pipeline.frameworks.torch import module
from enginesmith.pipeline.passes.export.export import Export, export_module
import onnx, onnxscript, onnx_ir, torch.onnx

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

loaded = module.load(source.resolve(sys.argv[1]), module.LoadOptions())
weights = sum(value.nbytes for value in loaded.module.parameters())
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
with tempfile.TemporaryDirectory() as folder:
    export_module(loaded, Path(folder), Export(), lambda text: None)
added = status("VmHWM") - before
print(json.dumps({"weights_bytes": weights, "added_bytes": added, "share": round(added / weights, 3)}))
"""


def main() -> None:
    """Measure, print, write."""
    found = {}
    for model in sys.argv[1:] or ["bert_base", "vit_b16"]:
        result = subprocess.run([sys.executable, "-c", MEASURED, model], capture_output=True, text=True, check=True)
        found[model] = json.loads(result.stdout.splitlines()[-1])
        print(f"{model}: {found[model]['share']} × the weights")
    (HERE / "results" / "export_memory.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
