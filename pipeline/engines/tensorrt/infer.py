"""Run this engine: python infer.py, or python infer.py --input name=file.npy (needs numpy and TensorRT's package)."""

import ctypes
import hashlib
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
MANIFEST = json.loads((HERE / "manifest.json").read_bytes())
if MANIFEST["schema"] != "enginesmith.bundle/1":
    raise SystemExit(f"manifest.json is of schema {MANIFEST['schema']}, which this script cannot read")
for name, kept in MANIFEST["files"].items():  # before anything is loaded: an engine is code
    if not (HERE / name).is_file() or hashlib.sha256((HERE / name).read_bytes()).hexdigest() != kept["sha256"]:
        raise SystemExit(f"{name} is not the file that was packaged: nothing was loaded")
trt, cuda, owner, at = __import__(MANIFEST["engine"]["package"]), ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), {}
codes = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(owner), 0), cuda.cuCtxSetCurrent(owner)]
runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
context = runtime.deserialize_cuda_engine((HERE / MANIFEST["engine"]["file"]).read_bytes()).create_execution_context()
given = {key: np.load(file).copy() for key, _, file in (arg.partition("=") for arg in sys.argv[1:] if arg != "--input")}
vector, bound = np.load(HERE / "test_vector.npz"), MANIFEST["thresholds"]
arrays = given or {name[6:]: vector[name].copy() for name in vector.files if name.startswith("input:")}
taken = [context.set_input_shape(name, value.shape) for name, value in arrays.items()]
for name in map(context.engine.get_tensor_name, range(context.engine.num_io_tensors)):
    shape, at[name] = tuple(context.get_tensor_shape(name)), ctypes.c_uint64()
    value = arrays.setdefault(name, np.empty(shape, trt.nptype(context.engine.get_tensor_dtype(name))))
    size = ctypes.c_size_t(max(value.nbytes, 1))
    codes += [cuda.cuMemAlloc_v2(ctypes.byref(at[name]), size), cuda.cuMemcpyHtoD_v2(at[name], value.ctypes, size)]
    taken += [context.set_tensor_address(name, at[name].value)]
if any(codes) or not all(taken) or not context.execute_async_v3(0) or cuda.cuCtxSynchronize():
    raise SystemExit(f"the engine did not run: CUDA's codes {codes}, shapes and addresses taken: {taken}")
for name in (key[7:] for key in vector.files if key.startswith("output:")):
    code = cuda.cuMemcpyDtoH_v2(arrays[name].ctypes, at[name], ctypes.c_size_t(arrays[name].nbytes))
    print(name, arrays[name].dtype, arrays[name].shape, arrays[name] if given else "")
    told = np.array(arrays[name] if given else vector[f"output:{name}"], float)
    silent = np.linalg.norm(told - arrays[name]) <= np.linalg.norm(told) / 10 ** (bound["min_sqnr_db"] / 20)
    if code or not (given or silent or abs(told - arrays[name]).max() <= bound["max_error_of_range"] * np.ptp(told)):
        raise SystemExit(f"{name} is not what the run answered to the test vector (copied with CUDA's code {code})")
