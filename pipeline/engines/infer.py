"""Run the engine in this folder with numpy and the engine's own package: python infer.py --help.

In a service: ``model = infer.Model()`` once, then ``answers = model({"image": array})`` for each request.
"""

import argparse
import ctypes
import hashlib
import json
import pathlib
import sys
import threading

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent


class Model:
    """Load a bundle, for any number of threads. Raise RuntimeError if a file was changed or the engine cannot run."""

    def __init__(self, folder=HERE):
        self.folder = pathlib.Path(folder)
        self.manifest = json.loads((self.folder / "manifest.json").read_bytes())
        if self.manifest["schema"] != "enginesmith.bundle/1":
            raise RuntimeError(f"manifest.json is of schema {self.manifest['schema']}, which this script cannot read")
        for name, kept in self.manifest["files"].items():  # before anything is loaded: an engine is code
            file = self.folder / name
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != kept["sha256"]:
                raise RuntimeError(f"{name} is not the file that was packaged: nothing was loaded")
        engine = self.manifest["engine"]
        start = _onnxruntime if engine["package"] == "onnxruntime" else _tensorrt
        try:
            self._run = start(self.folder / engine["file"], engine)
        except (ImportError, OSError) as error:
            made = f"the bundle was made with {engine['package']} {engine['version']} for {engine['device']}"
            raise RuntimeError(f"this machine cannot run the engine: {error}; {made}") from error

    def __call__(self, inputs):
        """Map arrays by input name to arrays by output name. Raise ValueError if the inputs do not fit the model."""
        specs = self.manifest["signature"]["inputs"]
        if set(inputs) != {spec["name"] for spec in specs}:
            raise ValueError(f"the inputs are {sorted(inputs)}; the model takes {[spec['name'] for spec in specs]}")
        return self._run({spec["name"]: _fit(np.asarray(inputs[spec["name"]]), **spec) for spec in specs})

    def check(self):
        """Answer the test vector; return the answers, and the names of those that do not match."""
        with np.load(self.folder / "test_vector.npz") as stored:
            vector = dict(stored)
        answers = self({name[6:]: value for name, value in vector.items() if name.startswith("input:")})
        return answers, [name for name, value in answers.items() if not self._near(vector[f"output:{name}"], value)]

    def _near(self, wanted, value):
        limits = self.manifest["thresholds"]
        if wanted.shape != value.shape or not wanted.size:
            return wanted.shape == value.shape
        if wanted.dtype.kind != "f":
            return np.mean(wanted == value) >= limits["min_agreement"]
        wanted, error = wanted.astype(float), np.abs(wanted.astype(float) - value)
        silent = np.square(error).sum() <= np.square(wanted).sum() / 10 ** (limits["min_sqnr_db"] / 10)
        return silent or error.max() <= limits["max_error_of_range"] * np.ptp(wanted)


def _fit(array, name, dtype, shape):
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name} is {array.dtype}; the model takes {dtype}")
    if len(shape) != array.ndim or any(size not in (given, str(size)) for size, given in zip(shape, array.shape)):
        raise ValueError(f"{name} has the shape {list(array.shape)}; the model takes {shape}")
    return np.require(array, dtype, "C")


def _onnxruntime(file, engine):
    import onnxruntime as ort

    chosen, options = engine["options"], ort.SessionOptions()
    options.intra_op_num_threads = chosen["intra_op_num_threads"]
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, chosen["graph_optimization_level"])
    session = ort.InferenceSession(str(file), options, **chosen["session"])
    if session.get_providers()[0] != chosen["session"]["providers"][0]:
        raise ImportError(f"this onnxruntime lacks {chosen['session']['providers'][0]} and would run on the CPU")
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def _tensorrt(file, engine):
    trt, cuda = __import__(engine["package"]), ctypes.CDLL("libcuda.so.1")
    owner, lock = ctypes.c_void_p(), threading.Lock()
    if cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(owner), 0) or cuda.cuCtxSetCurrent(owner):
        raise ImportError("CUDA finds no GPU that it can use")
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    loaded = runtime.deserialize_cuda_engine(file.read_bytes())
    if loaded is None:
        raise ImportError(f"TensorRT {trt.__version__} refuses it: it is built for {engine['compute_capabilities']}")
    context = loaded.create_execution_context()

    def run(feeds):
        at, arrays, codes = {}, dict(feeds), [cuda.cuCtxSetCurrent(owner)]  # of this thread
        if not all(context.set_input_shape(name, value.shape) for name, value in feeds.items()):
            raise ValueError(f"the engine is not built for {[list(value.shape) for value in feeds.values()]}")
        for name in map(loaded.get_tensor_name, range(loaded.num_io_tensors)):
            shape, at[name] = tuple(context.get_tensor_shape(name)), ctypes.c_uint64()
            value = arrays.setdefault(name, np.empty(shape, trt.nptype(loaded.get_tensor_dtype(name))))
            codes += [cuda.cuMemAlloc_v2(ctypes.byref(at[name]), ctypes.c_size_t(max(value.nbytes, 1)))]
            codes += [cuda.cuMemcpyHtoD_v2(at[name], value.ctypes, ctypes.c_size_t(value.nbytes))]
            codes += [not context.set_tensor_address(name, at[name].value)]
        codes += [any(codes) or not context.execute_async_v3(0) or cuda.cuCtxSynchronize()]
        for name in arrays.keys() - feeds.keys():
            codes += [cuda.cuMemcpyDtoH_v2(arrays[name].ctypes, at[name], ctypes.c_size_t(arrays[name].nbytes))]
        codes += [cuda.cuMemFree_v2(address) for address in at.values()]
        if any(codes):
            raise RuntimeError(f"the engine did not run: CUDA's codes are {codes}")
        return {name: value for name, value in arrays.items() if name not in feeds}

    def run_alone(feeds):
        with lock:  # a context takes one call at a time
            return run(feeds)

    return run_alone


def main():
    """Answer the command line."""
    parser = argparse.ArgumentParser(
        description="Run the engine in this folder. Without --input, run its test vector and compare the answers.",
        epilog="Exit code 0: done, and answers match; 1: they differ, or the engine cannot run; 2: wrong usage.",
    )
    parser.add_argument("--input", nargs="+", action="extend", default=[], metavar="NAME=FILE.npy", help="an input")
    parser.add_argument("--output", metavar="FILE.npz", help="save the answers in this file")
    given = parser.parse_args()
    try:
        model = Model()
        feeds = {name: np.load(file) for name, _, file in (text.partition("=") for text in given.input)}
        answers, wrong = (model(feeds), []) if feeds else model.check()
        if given.output:
            np.savez(given.output, **answers)
    except Exception as error:  # noqa: BLE001 - onnxruntime's own have no common class
        sys.exit(f"error: {error}")
    for name, value in answers.items():
        print(name, value.dtype, value.shape, value if feeds else "differs" if name in wrong else "matches")
    if wrong:
        sys.exit(f"error: {', '.join(wrong)} does not match the test vector")
    if not feeds:
        print("all answers match the test vector")


if __name__ == "__main__":
    main()
