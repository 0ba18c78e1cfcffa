"""Run this engine: python infer.py, or python infer.py --input name=file.npy (needs numpy and TensorRT's package)."""

import ctypes
import hashlib
import importlib
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
MANIFEST = json.loads((HERE / "manifest.json").read_bytes())
for name, kept in MANIFEST["files"].items():  # before anything is loaded: an engine is code
    if not (HERE / name).is_file() or hashlib.sha256((HERE / name).read_bytes()).hexdigest() != kept["sha256"]:
        raise SystemExit(f"{name} is not the file that was packaged: nothing was loaded")
trt, at, limits = importlib.import_module(MANIFEST["engine"]["package"]), {}, MANIFEST["thresholds"]
cuda, owner = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(owner), 0), cuda.cuCtxSetCurrent(owner)]
runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
engine = runtime.deserialize_cuda_engine((HERE / MANIFEST["engine"]["file"]).read_bytes())
context = engine.create_execution_context()
given = {name: np.load(file) for name, _, file in (text.partition("=") for text in sys.argv[1:] if text != "--input")}
vector = np.load(HERE / "test_vector.npz")
feeds = given or {name[6:]: vector[name] for name in vector.files if name.startswith("input:")}
arrays = {name: np.require(value, requirements="C") for name, value in feeds.items()}
taken = [context.set_input_shape(name, value.shape) for name, value in arrays.items()]
for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors)):
    if name not in arrays:
        arrays[name] = np.empty(tuple(context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name)))
    at[name], host, size = ctypes.c_uint64(), ctypes.c_void_p(arrays[name].ctypes.data), arrays[name].nbytes
    codes += [cuda.cuMemAlloc_v2(ctypes.byref(at[name]), ctypes.c_size_t(max(size, 1)))]
    codes += [cuda.cuMemcpyHtoD_v2(at[name], host, ctypes.c_size_t(size))]
    taken += [context.set_tensor_address(name, at[name].value)]
if any(codes) or not all(taken) or not context.execute_async_v3(0) or cuda.cuCtxSynchronize():
    raise SystemExit(f"the engine did not run: CUDA's codes {codes}, shapes and addresses taken: {taken}")
for name in sorted(arrays.keys() - feeds.keys()):
    value = arrays[name]
    if cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(value.ctypes.data), at[name], ctypes.c_size_t(value.nbytes)):
        raise SystemExit(f"{name} could not be copied from the device")
    print(name, value.dtype, value.shape, value if given else "")
    error = 0 if given else np.abs(vector[f"output:{name}"].astype(float) - value)
    signal = 0 if given else np.square(vector[f"output:{name}"].astype(float))
    silent = np.sum(np.square(error)) <= np.sum(signal) / 10 ** (limits["min_sqnr_db"] / 10)
    if not silent and not np.max(error) <= limits["max_error_of_range"] * np.ptp(vector[f"output:{name}"]):
        raise SystemExit(f"{name} is not what the run answered to the test vector")
