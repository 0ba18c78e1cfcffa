"""Run the engine in this folder with numpy and the engine's own package: python infer.py --help.

In a service: ``model = infer.Model()`` once, then ``answers = model({"image": array})`` for each request.
"""

import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    sys.path[:] = [folder for folder in sys.path if folder != sys.path[0]]  # else a numpy.py beside it is imported

import argparse
import ctypes
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import tempfile
import threading
import warnings

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
FAILED, DIFFERENT, UNABLE = 1, 3, 4


class Unable(RuntimeError):
    """This machine lacks what the engine needs."""


class Model:
    """Load a bundle, for any number of threads; plugins are libraries of TensorRT that its engine needs.

    Raise RuntimeError if a file was changed, and Unable, which is one, if this machine cannot run the engine.
    """

    def __init__(self, folder=HERE, plugins=()):
        self.folder, self.exceeded = pathlib.Path(folder), set()
        try:
            self.manifest = json.loads((self.folder / "manifest.json").read_bytes())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"manifest.json cannot be read: {error}; copy the bundle again") from error
        needed = ("schema", "files", "engine", "signature", "shapes", "thresholds")
        if lacking := [name for name in needed if not isinstance(self.manifest, dict) or name not in self.manifest]:
            raise RuntimeError(f"manifest.json has no {', '.join(lacking)}: it is damaged; copy the bundle again")
        if self.manifest["schema"] != "enginesmith.bundle/1":
            raise RuntimeError(f"manifest.json is of schema {self.manifest['schema']}, which this script cannot read")
        for name, entry in self.manifest["files"].items():  # before anything is loaded: an engine is code
            file = self.folder / name
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
                raise RuntimeError(f"{name} is not the file that was packaged: nothing was loaded")
        engine = self.manifest["engine"]
        starts = {"onnxruntime": _onnxruntime, "openvino": _openvino, "torch": _torch}
        start, signature = starts.get(engine["package"], _tensorrt), self.manifest["signature"]
        try:
            self._run = start(_plain(self.folder / engine["file"]), {**engine, **signature, "plugins": plugins})
        except (ImportError, OSError) as error:
            origin = f"the bundle was made with {engine['package']} {engine['version']} for {engine['device']}"
            raise Unable(f"this machine cannot run the engine: {error}; {origin}") from error

    def __call__(self, inputs):
        """Map arrays by input name to arrays by output name. Raise ValueError if the inputs do not fit the model."""
        specs = self.manifest["signature"]["inputs"]
        if not hasattr(inputs, "keys"):
            message = f"the inputs are given as {type(inputs).__name__}; give a dict of arrays by input name: "
            raise ValueError(message + f"{{{', '.join(repr(spec['name']) + ': …' for spec in specs)}}}")
        if set(inputs) != {spec["name"] for spec in specs}:
            raise ValueError(f"the inputs are {sorted(inputs)}; the model takes {[spec['name'] for spec in specs]}")
        feeds = {spec["name"]: _fit(inputs[spec["name"]], **spec) for spec in specs}
        for name, rows in self.manifest["signature"].get("tables", {}).items():
            given = feeds[name]  # some engines do not check it
            lowest = 0 if name in self.manifest["signature"].get("unsigned", ()) else -rows
            if given.size and not lowest <= given.min() <= given.max() < rows:
                message = f"{name} goes from {given.min()} to {given.max()}"
                raise ValueError(f"{message}; its table has {rows} rows, 0 to {rows - 1}")
        sizes = _bind_words(specs, feeds)
        for word, size in sizes.items():
            if size == 0 and self.manifest["shapes"].get(word, {"min": 1})["min"]:
                name = next(spec["name"] for spec in specs if any(word in _list_words(dim) for dim in spec["shape"]))
                advice = "" if word in ("batch", *specs[0]["shape"][:1]) else f": optimize with --shape {word}=0:…"
                raise ValueError(f"{word} is 0 in {name}, and engines do not compute with nothing{advice}")
        outside = {}
        for dim, known in self.manifest["shapes"].items():
            if not known["min"] <= (size := sizes.get(dim, known["min"])) <= known["max"]:
                outside[dim] = f"{dim} is {size}, and the engine was verified for {known['min']} to {known['max']}"
        try:
            answers = self._run(feeds)
        except Exception as error:
            if not outside:
                raise
            raise ValueError(f"{'; '.join(outside.values())}, and fails there: {error}") from error
        for dim in [dim for dim in outside if dim not in self.exceeded]:
            self.exceeded.add(dim)
            warnings.warn(f"{outside[dim]}: nobody has checked its answers there", stacklevel=2)
        return answers

    def check(self):
        """Answer the test vector; return the answers, and the names of those that do not match."""
        with np.load(self.folder / "test_vector.npz") as stored:
            vector = dict(stored)
        answers = self({name[6:]: value for name, value in vector.items() if name.startswith("input:")})
        chosen, pairs = self.manifest["signature"].get("unordered", {}), []
        tables = self._find_tables({name: vector[f"output:{name}"] for name in chosen if name in answers})
        for name, value in answers.items():
            kind, wanted = chosen.get(name) if name in tables else None, vector[f"output:{name}"]
            if kind != "positions" or len(chosen) == 1:  # which of two equal boxes was chosen says nothing
                keys = (f"range:{name}", f"rounding:{name}", f"quantized_db:{name}")
                bounds = [float(vector.get(key, -np.inf)) for key in keys]
                unstable = vector.get(f"unstable:{name}")
                if unstable is not None and not kind and wanted.shape == value.shape:  # rounding decides these
                    value = self._take_as_right(wanted, value, unstable)
                pairs.append((name, self._alike(wanted, value) if kind else self._near(wanted, value, *bounds)))
        return answers, [name for name, near in pairs if not near]

    def _take_as_right(self, wanted, value, unstable):
        """Put what is wanted in the place of numbers that rounding decides, where it makes others of that kind."""
        records = unstable[unstable["bits"] == self.manifest["thresholds"]["right_bits"]]
        taken, right = value.flatten(), wanted.reshape(-1)[records["place"]]
        given = taken[records["place"]]
        near = np.isinf(records["reach"]) | (records["seen"] == given[:, None]).any(1)
        near |= np.abs(given.astype(float) - right.astype(float)) <= records["reach"]
        taken[records["place"][near]] = right[near]
        return taken.reshape(value.shape)

    def _find_tables(self, chosen):
        """Find the outputs whose rows are chosen by values; single numbers in a fixed order are no rows."""
        signature, groups = self.manifest["signature"], {}
        batches = {_batch_of(spec["shape"])[0] for spec in signature["inputs"] if spec["shape"]}
        symbols = {word for spec in signature["inputs"] for dim in spec["shape"] for word in _list_words(dim)}
        for spec in signature["outputs"]:
            name, shape = spec["name"], spec["shape"]
            if name not in chosen or not shape or (len(shape) == 1 and shape[0] in batches):
                continue
            word, place = _batch_of(shape)
            axis = int(place == 0 and word in batches and len(shape) > 1)
            batched = len(shape) > 1 and word in batches
            value = chosen[name]
            rows = value.shape[axis] * (value.shape[place] if batched else 1)
            columns = value.size // rows if rows else 1
            is_open = not symbols.issuperset(_list_words(shape[axis]))
            groups.setdefault((batched, value.shape[axis]), []).append((name, columns, is_open))
        tables = (each for each in groups.values() if sum(n for _, n, _ in each) > 1 or any(o for _, _, o in each))
        return {name for each in tables for name, _, _ in each}

    def _alike(self, wanted, value):
        """Compare rows that were chosen by values: nearly as many, and nearly all of them near one that was wanted."""
        limits, (few, many) = self.manifest["thresholds"], sorted(map(len, (wanted, value)))
        least = min(limits["min_agreement"], 0.98)
        if not few or few < least * many:
            return few == many
        width = wanted.shape[-1] if wanted.ndim > 1 else 1
        rows, given = wanted.reshape(-1, width).astype(float), value.reshape(-1, width).astype(float)
        finite = rows[np.isfinite(rows).all(1)] if np.isfinite(rows).all(1).any() else np.zeros((1, width))
        columns = enumerate(np.unique(finite, axis=0).T)
        scales = np.array([_scale(column, np.ptp(finite), at > 3 or width == 1) for at, column in columns])
        near = []
        for row in rows:  # NaN is near NaN, and infinity near itself
            same = (given == row) | (np.isnan(given) & np.isnan(row))
            with np.errstate(invalid="ignore"):
                near.append((same | (np.abs(given - row) / scales <= self._share())).all(1).any())
        return np.mean(near) >= least

    def _share(self):
        limits = self.manifest["thresholds"]
        return max(limits["max_error_of_range"], 10 ** (-limits["min_sqnr_db"] / 20))

    def _near(self, wanted, value, known_range, rounding=0.0, least_db=-np.inf):
        limits = self.manifest["thresholds"]
        if wanted.shape != value.shape or not wanted.size:
            return wanted.shape == value.shape
        if wanted.dtype.kind != "f":
            return np.mean(wanted == value) >= limits["min_agreement"]
        wanted, value = wanted.astype(float), value.astype(float)
        finite = np.isfinite(wanted) & np.isfinite(value)
        if not np.array_equal(wanted[~finite], value[~finite], equal_nan=True):
            return False
        wanted, value = wanted[finite], value[finite]
        filled = np.abs(wanted) >= _find_fill(np.abs(wanted))
        if not np.allclose(value[filled], wanted[filled], rtol=self._share(), atol=0):
            return False
        wanted, error = wanted[~filled], np.abs(wanted - value)[~filled]
        noise, power = np.square(error).sum(), np.square(wanted).sum()
        silent, loud = (noise * 10 ** (decibels / 10) <= power for decibels in (limits["min_sqnr_db"], least_db))
        span, allowed = max(np.ptp(wanted) if wanted.size else 0, known_range), limits["max_error_of_range"]
        exact = limits["right_bits"] >= 19 and allowed > 0 and loud  # in float32, where rounding moves answers
        return silent or error.max() <= max(allowed * span, rounding if exact else 0)


def _list_words(dim):
    """List the words of a dimension: none of a number, both of past+length."""
    return [part for part in str(dim).split("+") if not part.isdecimal()]


def _compute_size(dim, sizes):
    """Compute the size of a sum; that of a word that is not there counts for nothing."""
    return sum(int(part) if part.isdecimal() else sizes.get(part, 0) for part in dim.split("+"))


def _bind_words(specs, feeds):
    """Find the size of each word: by the dimensions that it stands in alone, else by sums."""
    sizes, sums = {}, []
    for spec in specs:
        for dim, size in zip(spec["shape"], feeds[spec["name"]].shape, strict=True):
            if "+" in str(dim):
                sums.append((spec["name"], dim, size))
            elif isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                raise ValueError(f"{spec['name']} has {size} for {dim}, and the inputs before it {sizes[dim]}")
    before = -1
    while before < len(sizes):
        before = len(sizes)
        for name, dim, size in sums:
            unknown = [word for word in _list_words(dim) if word not in sizes]
            if len(unknown) == 1:
                least = _compute_size(dim, sizes)
                if size < least:
                    raise ValueError(f"{name} has {size} for {dim}, and {least} or more is needed beside other inputs")
                sizes[unknown[0]] = size - least
    for name, dim, size in sums:
        if size != _compute_size(dim, sizes):
            parts = "+".join(part if part.isdecimal() else str(sizes[part]) for part in dim.split("+"))
            raise ValueError(f"{name} has {size} for {dim}, and the other inputs {parts} = {_compute_size(dim, sizes)}")
    return sizes


def _batch_of(shape):
    """Return the dimension of the batch, and its place."""
    place = shape.index("batch") if "batch" in shape else 0
    return shape[place], place


def _scale(column, wide, may_be_classes):
    """Return what counts as 1 in a column of rows: classes have to be equal, and probabilities go from 0 to 1."""
    if (column >= 0).all() and (column <= 1).all():
        return 1.0
    whole = (column == np.round(column)).all() and column.min() >= -1 and column.max() <= 10_000
    return 1e-9 if may_be_classes and whole and 2 * len(np.unique(column)) <= len(column) else wide or 1.0


def _find_fill(sizes):
    """Find the size from which numbers fill masked places, such as -1e9, and hide all others."""
    least = 0.95 * sizes.max(initial=0.0)
    rest = sizes.max(initial=0.0, where=sizes < least)
    return least if least >= 950 and 0.01 <= rest <= least / 95 else np.inf


def _fit(given, name, dtype, shape):
    array, whole, wanted = np.asarray(given), "iu", np.dtype(dtype).kind
    if isinstance(given, (list, tuple)) and not array.size:  # [[]] has neither a kind of numbers nor the sizes within
        within = shape[array.ndim :]
        known = all(isinstance(size, int) for size in within)
        array = np.empty((*array.shape, *(within if known else ())), dtype)
    as_in_json = isinstance(given, (int, list, tuple)) and array.dtype == np.int64  # which may write 1.0 as 1
    if array.dtype.kind in whole and wanted in whole:
        limits = np.iinfo(dtype)
        if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
            raise ValueError(f"{name} goes from {array.min()} to {array.max()}; the model takes {dtype}")
    elif array.dtype.kind != wanted and not (wanted == "f" and as_in_json):
        raise ValueError(f"{name} is {array.dtype}; the model takes {dtype}, and no other kind of numbers is converted")
    if len(shape) != array.ndim or any(size not in (given, str(size)) for size, given in zip(shape, array.shape)):
        raise ValueError(f"{name} has the shape {list(array.shape)}; the model takes {shape}")
    with np.errstate(over="ignore"):
        made = np.require(array, dtype, "C")
    if wanted == "f" and made.dtype.itemsize < array.dtype.itemsize:
        beyond = array[np.isinf(made) & np.isfinite(array)]
        if beyond.size:
            raise ValueError(f"{name} has {beyond[0]}; the model takes {dtype}, up to {np.finfo(dtype).max}")
    return made


def _plain(file):
    """Name a file for libraries that take paths in UTF-8 alone, by its open folder where its path is not."""
    try:
        str(file).encode()
    except UnicodeEncodeError:
        return pathlib.Path(f"/proc/self/fd/{os.open(file.parent, os.O_RDONLY)}", file.name)
    return file


def _onnxruntime(file, engine):
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else it reports to Microsoft
    import onnxruntime as ort

    chosen, options = engine["options"], ort.SessionOptions()
    given, wanted = dict(chosen["session"]), chosen["session"]["providers"][0]
    if wanted != "CPUExecutionProvider" and "torch" not in sys.modules:
        ort.preload_dlls()  # CUDA's libraries lie in packages of their own, where only torch or this call finds them
    for name in chosen.get("imports", ()):  # packages that load the libraries of the provider
        __import__(name)
    options.intra_op_num_threads = chosen["intra_op_num_threads"] or len(os.sched_getaffinity(0))
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, chosen["graph_optimization_level"])
    for name, value in chosen.get("config_entries", {}).items():
        options.add_session_config_entry(name, value)
    if chosen.get("cache"):  # the provider may write there, so it gets a copy
        engine["scratch"] = tempfile.TemporaryDirectory()
        shutil.copytree(file.parent / "cache", engine["scratch"].name, dirs_exist_ok=True)
        given["provider_options"][0][chosen["cache"]] = engine["scratch"].name
    if chosen.get("plugin"):
        _attach(ort, options, __import__(chosen["plugin"]), given.pop("provider_options")[0], given.pop("providers")[0])
    try:
        session = ort.InferenceSession(str(file), options, enable_fallback=0, **given)
    except Exception as error:
        if "CUDA failure 35" not in str(error):  # cudaErrorInsufficientDriver
            raise
        raise ImportError("the NVIDIA driver is too old for this onnxruntime: install a newer driver") from error
    if wanted != session.get_providers()[0]:
        why = "did not start: no GPU, no driver for it, or a library is missing"
        lacks = "is not in this onnxruntime: install onnxruntime-gpu alone"
        raise ImportError(f"{wanted} {why if wanted in ort.get_available_providers() else lacks}")
    names = [output.name for output in session.get_outputs()]
    if any("enable_cuda_graph" in options for options in given.get("provider_options", ())):
        return _replay(ort, session, names)
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def _attach(ort, options, plugin, settings, wanted):
    if wanted not in {device.ep_name for device in ort.get_ep_devices()}:
        ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == wanted]
    if not devices:
        raise ImportError(f"{plugin.__name__} finds no GPU that it runs on")
    options.add_provider_for_devices(devices[:1], settings)


def _replay(ort, session, names):
    known, lock = {}, threading.Lock()

    def options_of(graph):
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options

    def run_as(options, binding):  # past onnxruntime's wrapper, which looks at options for 27 to 80 µs a call
        session._sess.run_with_iobinding(binding._iobinding, options)

    def bind(feeds):
        binding = session.io_binding()
        held = {name: ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0) for name, value in feeds.items()}
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name, "cuda", 0)
        run_as(options_of(-1), binding)  # without a capture: outputs are allocated, kernels picked
        outputs = binding.get_outputs()
        for name, value in zip(names, outputs, strict=True):
            binding.bind_ortvalue_output(name, value)
        return options_of(len(known) + 1), binding, held, outputs

    def run(feeds):
        shapes = tuple((name, value.shape) for name, value in sorted(feeds.items()))
        with lock:  # a graph has one set of buffers
            options, binding, held, _ = known[shapes] = known.get(shapes) or bind(feeds)
            for name, value in feeds.items():
                held[name].update_inplace(value)
            run_as(options, binding)
            return dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))

    return run


def _openvino(file, engine):
    sys.modules.setdefault("openvino_telemetry", None)  # else importing openvino reports to its makers
    import openvino as ov

    core, options = ov.Core(), dict(engine["options"])
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if options["INFERENCE_PRECISION_HINT"] == "bf16" and "BF16" not in able:
        raise ImportError("this processor has no instructions for bf16 (AVX512_BF16 or AMX)")
    options["INFERENCE_NUM_THREADS"] = options["INFERENCE_NUM_THREADS"] or len(os.sched_getaffinity(0))
    fixed, shapes = options.pop("FIXED_BATCHES", ()), [spec["shape"] for spec in engine["inputs"]]
    places = [(at, axis) for at, shape in enumerate(shapes) for axis, size in enumerate(shape) if isinstance(size, str)]
    words, inputs = {shapes[at][axis] for at, axis in places}, {at for at, _ in places}
    if len(words) != 1 or len(inputs) < len(places) or (words != {"batch"} and any(axis for _, axis in places)):
        fixed = ()  # more than the batch is dynamic
    known, ended, own, lock = {}, [], threading.local(), threading.Lock()

    def compiled(batch):
        with lock:
            if batch not in known:  # apart for each of these batch sizes, which is faster; once for all others
                graph = core.read_model(file)
                if batch in fixed:
                    try:
                        graph.reshape({at: [*shapes[at][:axis], batch, *shapes[at][axis + 1 :]] for at, axis in places})
                    except RuntimeError:  # it takes no such size
                        graph = core.read_model(file)
                known[batch] = core.compile_model(graph, "CPU", options)
            return known[batch]

    def run(feeds):
        values = [value.view(value.dtype.name) for value in feeds.values()]  # it knows int64, and not longlong
        for name, value in feeds.items():  # whole numbers are computed in 32 bits
            wide = value.dtype.kind in "iu" and value.dtype.itemsize > 2 and value.size
            if wide and not -(2**31) <= value.min() <= value.max() < 2**31:
                raise ValueError(f"{name} has whole numbers that do not fit in the 32 bits that OpenVINO has for them")
        batch = next((size for at, axis in places[:1] if (size := values[at].shape[axis]) in fixed), None)
        own.requests = requests = getattr(own, "requests", {})  # of this thread
        model = compiled(batch)
        if batch not in requests or requests[batch][0] is not model:
            dynamic = any(value.partial_shape.is_dynamic for value in (*model.inputs, *model.outputs))
            silent = dynamic and model.get_property("INFERENCE_NUM_THREADS") == 1
            requests[batch] = model, model.create_infer_request(), silent
        _, request, silent = requests[batch]
        try:
            if silent:  # on one thread, infer raises nothing where a call fails, and answers what an earlier one did
                request.start_async(values, share_inputs=True)
                request.wait()
                answers = [value.data.copy() for value in request.output_tensors]
            else:
                answers = request.infer(values, share_inputs=True).to_tuple()
        except RuntimeError:  # OpenVINO keeps sizes of a call that failed: the next one needs another compiled model
            failed = known.pop(batch, None)
            ended.extend([failed] if silent else [])  # freed, it may end the process in a later call
            options["INFERENCE_NUM_THREADS"] = max(2, options["INFERENCE_NUM_THREADS"])
            raise
        return dict(zip([spec["name"] for spec in engine["outputs"]], answers, strict=True))

    return run


def _torch(file, engine):
    options, here, flags = engine["options"], importlib.metadata.version("torch"), pathlib.Path("/proc/cpuinfo")
    import torch

    known = set(flags.read_text(encoding="utf-8").split()) if flags.is_file() else {platform.processor()}
    alike = platform.machine() == options["machine"] and known.issuperset(options["instructions"])
    if here != options["torch"] or not alike:
        needed = f"torch {options['torch']} on {options['machine']} with {' '.join(options['instructions'])}"
        raise ImportError(f"the machine code in it was compiled for {needed}, and here is torch {here}")
    target = "sm{}{}".format(*torch.cuda.get_device_capability()) if engine["device"] == "cuda" else ""
    if target != options["target"]:
        raise ImportError(f"it is compiled for a GPU of the kind {options['target']}, and here is {target}")
    cast = None if options["dtype"] == "float32" else getattr(torch, options["dtype"])
    if engine["device"] == "cuda":  # as in the measured run: torch's default rounds convolutions to TF32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = torch._inductor.aoti_load_package(str(file))

    def place(value):
        tensor = torch.from_numpy(np.require(value, requirements="W"))
        return tensor.to(engine["device"], cast if value.dtype.kind == "f" else None)

    def run(feeds):
        before = torch.get_num_threads()  # of the thread that calls, as what is set is
        torch.set_num_threads(options["threads"] or before)
        try:
            with torch.inference_mode():
                answers = model(*map(place, feeds.values()))
        finally:
            torch.set_num_threads(before)
        pairs = zip(engine["outputs"], answers, strict=True)
        return {spec["name"]: value.to("cpu", getattr(torch, spec["dtype"])).numpy() for spec, value in pairs}

    return run


def _tensorrt(file, engine):
    trt, cuda = __import__(engine["package"]), ctypes.CDLL("libcuda.so.1")
    owner, lock, logger = ctypes.c_void_p(), threading.Lock(), trt.Logger(trt.Logger.ERROR)
    if cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(owner), 0) or cuda.cuCtxSetCurrent(owner):
        raise ImportError("CUDA finds no GPU that it can use")
    _load_plugins(trt, logger, engine)
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = bool(engine["options"].get("host_code"))
    loaded = runtime.deserialize_cuda_engine(file.read_bytes())
    if loaded is None:
        parts = [ctypes.c_int(), ctypes.c_int()]
        for attribute, part in enumerate(parts, 75):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, 0)
        here = (trt.__version__, "sm" + "".join(str(part.value) for part in parts))
        message = f"it is built by {engine['version']} for {', '.join(engine['compute_capabilities'])}"
        fits = here[0] == engine["version"] and here[1] in engine["compute_capabilities"]
        raise (RuntimeError if fits else ImportError)(f"TensorRT {here[0]} on {here[1]} refuses it: {message}")
    context = loaded.create_execution_context()
    at, sizes, shapes = {}, {}, {}  # of memory on the GPU, by tensor; of outputs whose size only a run decides
    outputs = {spec["name"]: spec["dtype"] for spec in engine["outputs"]}
    on_host = {name for name in outputs if loaded.get_tensor_location(name) == trt.TensorLocation.HOST}

    def reserve(name, size):
        if size > sizes.get(name, 0):
            cuda.cuMemFree_v2(at.get(name, ctypes.c_uint64()))
            at[name] = ctypes.c_uint64()
            sizes[name] = 0 if cuda.cuMemAlloc_v2(ctypes.byref(at[name]), ctypes.c_size_t(size)) else size
        return at[name].value

    class Allocator(trt.IOutputAllocator):
        def __init__(self):
            trt.IOutputAllocator.__init__(self)

        def reallocate_output(self, name, memory, size, alignment):
            return reserve(name, size)

        def reallocate_output_async(self, name, memory, size, alignment, stream):
            return reserve(name, size)

        def notify_shape(self, name, shape):
            shapes[name] = tuple(shape)

    allocator = Allocator()

    def profile_for(feeds):
        for index in range(loaded.num_optimization_profiles):  # the first that takes all shapes: narrow ones come first
            limits = [(loaded.get_tensor_profile_shape(name, index), value.shape) for name, value in feeds.items()]
            if all(a <= b <= c for (low, _, high), shape in limits for a, b, c in zip(low, shape, high, strict=True)):
                return index
        raise ValueError(f"the engine is not built for {[list(value.shape) for value in feeds.values()]}")

    def run(feeds):
        with lock:  # a context takes one call at a time
            codes, answers = [cuda.cuCtxSetCurrent(owner)], {}  # of this thread
            if (profile := profile_for(feeds)) != context.active_optimization_profile:
                codes += [not context.set_optimization_profile_async(profile, 0)]
            for name, value in feeds.items():
                codes += [not context.set_input_shape(name, value.shape)]
                codes += [not context.set_tensor_address(name, reserve(name, max(value.nbytes, 1)))]
                codes += [cuda.cuMemcpyHtoD_v2(at[name], value.ctypes, ctypes.c_size_t(value.nbytes))]
            for name, dtype in outputs.items():
                if -1 in (shape := tuple(context.get_tensor_shape(name))):
                    codes += [not context.set_output_allocator(name, allocator)]
                    continue
                answers[name] = value = np.empty(shape, dtype)
                address = value.ctypes.data if name in on_host else reserve(name, max(value.nbytes, 1))
                codes += [not context.set_tensor_address(name, address)]
            if any(codes) or not context.execute_async_v3(0) or cuda.cuCtxSynchronize():
                raise RuntimeError(f"the engine did not run: CUDA's and TensorRT's codes before it are {codes}")
            for name, dtype in outputs.items():
                value = answers.setdefault(name, np.empty(shapes.get(name, ()), dtype))
                size = ctypes.c_size_t(value.nbytes)
                if name not in on_host and (code := cuda.cuMemcpyDtoH_v2(value.ctypes, at[name], size)):
                    raise RuntimeError(f"CUDA cannot copy {name} from the GPU: error {code}")
            return {name: answers[name] for name in outputs}

    return run


def _load_plugins(trt, logger, engine):
    if engine["package"] == "tensorrt":
        trt.init_libnvinfer_plugins(logger, "")
    paths = [pathlib.Path(path).resolve() for path in engine["plugins"]]
    for path in paths:
        if trt.get_plugin_registry().load_library(str(path)) is None:
            raise ImportError(f"{path} is no library of plugins for TensorRT {trt.__version__}")
    if lacking := set(engine["options"].get("plugins", ())) - {path.name for path in paths}:
        raise ImportError(f"it needs the plugin libraries {', '.join(sorted(lacking))}: give them with --plugins")


def _read_array(file):
    with pathlib.Path(file).open("rb") as opened:
        try:
            return np.lib.format.read_array(opened, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: give a .npy file of one array, from numpy.save") from error


def _print_lines(lines):
    """Print lines; that nobody reads them changes no exit code, but a full disk does."""
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails once more at its end
        if not isinstance(error, BrokenPipeError):
            print(f"error: the answers cannot be printed: {error.strerror}", file=sys.stderr)
            sys.exit(FAILED)


def main():
    """Answer the command line."""
    parser = argparse.ArgumentParser(
        description="Run the engine in this folder. Without --input, run its test vector and compare the answers.",
        epilog="Exit code 0: done, and answers match; 1: it failed; 2: wrong usage; 3: answers differ; 4: this machine "
        "cannot run the engine.",
    )
    parser.add_argument("--input", nargs="+", action="extend", default=[], metavar="NAME=FILE.npy", help="an input")
    parser.add_argument("--output", metavar="FILE.npz", help="save the answers in this file")
    parser.add_argument("--plugins", nargs="+", action="extend", default=[], metavar="FILE.so", help="TensorRT plugins")
    given = parser.parse_args()
    if unnamed := [text for text in given.input if "=" not in text]:
        parser.error(f"--input {unnamed[0]}: write NAME={unnamed[0]}, with the name of an input (see manifest.json)")
    try:
        model = Model(plugins=given.plugins)
        feeds = {name: _read_array(file) for name, _, file in (text.partition("=") for text in given.input)}
        answers, wrong = (model(feeds), []) if feeds else model.check()
        if given.output:
            np.savez(given.output, **answers)
    except Exception as error:  # noqa: BLE001 - onnxruntime's own have no common class
        print(f"error: {error}", file=sys.stderr)
        sys.exit(UNABLE if isinstance(error, Unable) else FAILED)
    lines = [
        f"{name} {value.dtype} {value.shape} {value if feeds else 'differs' if name in wrong else 'matches'}"
        for name, value in answers.items()
    ]
    _print_lines(lines if feeds or wrong else [*lines, "all answers match the test vector"])
    if wrong:
        print(f"error: {', '.join(wrong)} does not match the test vector", file=sys.stderr)
        sys.exit(DIFFERENT)


if __name__ == "__main__":
    main()
