"""Run this model: python infer.py, or python infer.py --input name=file.npy (needs numpy and onnxruntime)."""

import hashlib
import json
import pathlib
import sys

import numpy as np
import onnxruntime as ort

HERE = pathlib.Path(__file__).resolve().parent
MANIFEST = json.loads((HERE / "manifest.json").read_bytes())
if MANIFEST["schema"] != "enginesmith.bundle/1":
    raise SystemExit(f"manifest.json is of schema {MANIFEST['schema']}, which this script cannot read")
for name, kept in MANIFEST["files"].items():  # before anything is loaded: a model is code
    if not (HERE / name).is_file() or hashlib.sha256((HERE / name).read_bytes()).hexdigest() != kept["sha256"]:
        raise SystemExit(f"{name} is not the file that was packaged: nothing was loaded")
CHOSEN, OPTIONS = MANIFEST["engine"]["options"], ort.SessionOptions()
OPTIONS.intra_op_num_threads = CHOSEN["intra_op_num_threads"]
OPTIONS.graph_optimization_level = getattr(ort.GraphOptimizationLevel, CHOSEN["graph_optimization_level"])
SESSION = ort.InferenceSession(str(HERE / MANIFEST["engine"]["file"]), OPTIONS, **CHOSEN["session"])
if SESSION.get_providers()[0] != CHOSEN["session"]["providers"][0]:
    raise SystemExit("this onnxruntime lacks the provider that was packaged for, and would run on the CPU")


def near(wanted, value, limits=MANIFEST["thresholds"]):
    if wanted.dtype.kind != "f":
        return np.mean(wanted == value) >= limits["min_agreement"]
    wanted, error = wanted.astype(float), np.abs(wanted.astype(float) - value)
    silent = np.square(error).sum() <= np.square(wanted).sum() / 10 ** (limits["min_sqnr_db"] / 10)
    return silent or error.max() <= limits["max_error_of_range"] * np.ptp(wanted)


given = {name: np.load(file) for name, _, file in (text.partition("=") for text in sys.argv[1:] if text != "--input")}
vector = np.load(HERE / "test_vector.npz")
feeds = given or {name[6:]: vector[name] for name in vector.files if name.startswith("input:")}
for output, value in zip(SESSION.get_outputs(), SESSION.run(None, feeds), strict=True):
    print(output.name, value.dtype, value.shape, value if given else "")
    if not given and not near(vector[f"output:{output.name}"], value):
        raise SystemExit(f"{output.name} is not what the run answered to the test vector")
