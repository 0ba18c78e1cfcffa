"""Find the software between a model and a GPU: driver, CUDA, libraries, and what each was built for."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from enginesmith.pipeline.errors import MissingCapability, broken_package
from enginesmith.pipeline.system import machine, nvidia, software
from enginesmith.pipeline.system.cpu import text
from enginesmith.pipeline.system.software import Formats, Stack

TENSORRTS = ("tensorrt", "tensorrt-rtx")
_LISTED = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", *TENSORRTS, "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_CUDA_RUNTIMES = ("libcudart.so.12", "libcudart.so.13")
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_SURE = {"ir": 8, "opset": 17}
"""Formats that every version of ONNX Runtime takes that this project runs on."""


_IMPORT = """import os, sys
from enginesmith.pipeline.engines.telemetry import import_without_telemetry
answer, sys.stdout = sys.stdout, sys.stderr
try:
    import_without_telemetry(sys.argv[1])
except Exception as error:
    answer.write(str(error).strip() or type(error).__name__)
answer.flush()
os._exit(0)
"""


def find_broken(packages: Iterable[str]) -> dict[str, MissingCapability]:
    """Import the packages that are installed, each in a process of its own, and describe those that fail."""
    installed = [package for package in packages if software.find(package)]
    with ThreadPoolExecutor() as pool:
        reasons = zip(installed, pool.map(_explain_failure, installed), strict=True)
    return {package: broken_package(package, reason) for package, reason in reasons if reason}


def _explain_failure(package: str) -> str:
    """Import a package in a process, which that may end, and return why it fails; empty if it does not."""
    searched = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)  # as it is here, so -P
    done = subprocess.run(
        [sys.executable, "-P", "-c", _IMPORT, package],
        env={**os.environ, "PYTHONPATH": searched},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode < 0:
        return f"importing it ends the process by {signal.Signals(-done.returncode).name}"
    return f"importing it ends the process with code {done.returncode}" if done.returncode else done.stdout


def find_stack(broken: Collection[str] = ()) -> Stack:
    """Find what is installed here; ``broken`` are packages that cannot be imported.

    Takes 0.5 s, and some more where a GPU is: torch is asked then.
    """
    driver, gpus = nvidia.driver(), machine.gpu_states()
    variants = {name: software.cuda_variants(name) for name in TENSORRTS}
    parts = [part for by_cuda in variants.values() for names in by_cuda.values() for part in names]
    requirements = {
        **{name: tuple(software.requirements(name)) for name in ("torch", "onnxruntime-gpu")},
        **{name: tuple(software.requirements(name, "tensorrt")) for name in (*TENSORRTS, *parts)},
    }
    torch_cuda, torch_targets = nvidia.torch_cuda(), tuple[str, ...]()
    if torch_cuda and gpus and "torch" not in broken:
        import torch

        torch_targets = tuple(torch.cuda.get_arch_list())
    glibc = {name: software.needed_glibc(name) for name in (*_LISTED, *parts)}
    written = None
    if software.find("onnx") and "onnx" not in broken:
        import onnx

        written = Formats(ir=onnx.IR_VERSION, opset=onnx.defs.onnx_opset_version())
    return Stack(
        driver=next((gpu.driver for gpu in gpus), None),
        driver_cuda=None if driver.version is None else (driver.version // 1000, driver.version % 1000 // 10),
        driver_reason=driver.reason,
        gpu_without_driver=not gpus and _is_gpu_plugged_in(),
        gpus=gpus,
        versions=software.versions(_LISTED),
        torch_cuda=torch_cuda,
        torch_targets=torch_targets,
        onnxruntime_cuda=nvidia.cuda_of("onnxruntime", "capi/build_and_package_info.py"),
        cudnn=software.cudnn(),
        requirements={name: needs for name, needs in requirements.items() if needs},
        packages=software.versions(sorted({need.name for needs in requirements.values() for need in needs})),
        variants={name: by_cuda for name, by_cuda in variants.items() if by_cuda},
        loadable=tuple(name for name in _CUDA_RUNTIMES if software.loads(name)) if gpus else (),
        glibc=platform.libc_ver()[1] or None,
        glibc_needed={name: version for name, version in glibc.items() if version},
        written=written,
        taken=_taken(written) if written and software.find("onnxruntime") and "onnxruntime" not in broken else None,
    )


def _is_gpu_plugged_in() -> bool:
    """Tell whether the PCI bus has a display device of NVIDIA's."""
    return any(
        text(folder / "vendor") == _NVIDIA and (text(folder / "class") or "").startswith(_DISPLAY)
        for folder in (_PCI.iterdir() if _PCI.is_dir() else ())
    )


def _taken(newest: Formats) -> Formats | None:
    """Find the newest format that ONNX Runtime takes, by opening a tiny model in ever older ones: it does not tell."""
    try:
        import onnxruntime as ort
        from onnxruntime.capi import onnxruntime_pybind11_state as errors
    except ImportError:
        return None
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "smallest", [x], [y])
    options = ort.SessionOptions()
    options.log_severity_level = 4

    def opens(ir: int, opset: int) -> bool:
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
        try:
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except (errors.Fail, errors.InvalidGraph, errors.InvalidProtobuf, errors.NotImplemented):
            return False
        return True

    formats = dict(_SURE)
    for kind, highest in newest:
        older = range(highest, _SURE[kind], -1)
        formats[kind] = next((number for number in older if opens(**{**_SURE, kind: number})), _SURE[kind])
    return Formats(**formats)
