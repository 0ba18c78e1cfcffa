"""Find the software between a model and a GPU: driver, CUDA, libraries, and what each was built for."""

import platform
from pathlib import Path

from enginesmith.pipeline.system import machine, nvidia, software
from enginesmith.pipeline.system.cpu import text
from enginesmith.pipeline.system.software import Formats, Stack

TENSORRTS = ("tensorrt", "tensorrt-rtx")
_CUDA_RUNTIMES = ("libcudart.so.12", "libcudart.so.13")
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_LOOKED_AT = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", *TENSORRTS, "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_SURE = {"ir": 8, "opset": 17}
"""What every version of ONNX Runtime that this project runs on takes."""


def find_stack() -> Stack:
    """Find what is installed here. Takes 0.5 s, and some more where a GPU is: torch is asked then."""
    driver, gpus = nvidia.driver(), machine.gpu_states()
    variants = {name: software.cuda_variants(name) for name in TENSORRTS}
    parts = [part for by_cuda in variants.values() for names in by_cuda.values() for part in names]
    requirements = {
        **{name: tuple(software.requirements(name)) for name in ("torch", "onnxruntime-gpu")},
        **{name: tuple(software.requirements(name, "tensorrt")) for name in (*TENSORRTS, *parts)},
    }
    wanted = {need.name for some in requirements.values() for need in some}
    torch_cuda = software.torch_cuda()
    glibc = {name: software.needed_glibc(name) for name in (*_LOOKED_AT, *parts)}
    return Stack(
        driver=next((gpu.driver for gpu in gpus), None),
        driver_cuda=None if driver.version is None else (driver.version // 1000, driver.version % 1000 // 10),
        driver_reason=driver.reason,
        gpu_without_driver=not gpus and _gpu_on_bus(),
        gpus=gpus,
        versions=software.versions(_LOOKED_AT),
        torch_cuda=torch_cuda,
        torch_targets=_torch_targets() if torch_cuda and gpus else (),
        onnxruntime_cuda=software.cuda_of("onnxruntime", "capi/build_and_package_info.py"),
        cudnn=software.cudnn(),
        requirements={name: some for name, some in requirements.items() if some},
        packages=software.versions(sorted(wanted)),
        variants={name: by_cuda for name, by_cuda in variants.items() if by_cuda},
        loadable=tuple(name for name in _CUDA_RUNTIMES if software.loads(name)) if gpus else (),
        glibc=platform.libc_ver()[1] or None,
        glibc_needed={name: version for name, version in glibc.items() if version},
        written=_written(),
        taken=_taken(),
    )


def _gpu_on_bus() -> bool:
    """Tell if the PCI bus shows an NVIDIA display controller."""
    return any(
        text(folder / "vendor") == _NVIDIA and (text(folder / "class") or "").startswith(_DISPLAY)
        for folder in (_PCI.iterdir() if _PCI.is_dir() else ())
    )


def _torch_targets() -> tuple[str, ...]:
    import torch

    return tuple(torch.cuda.get_arch_list())


def _written() -> Formats | None:
    if not software.find("onnx"):
        return None
    import onnx

    return Formats(ir=onnx.IR_VERSION, opset=onnx.defs.onnx_opset_version())


def _taken() -> Formats | None:
    """Find the newest format that ONNX Runtime takes, by opening a tiny model in ever older ones: it does not tell."""
    newest = _written()
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return None
    if newest is None:
        return None
    formats = dict(_SURE)
    for kind, highest in newest:
        tried = range(highest, _SURE[kind], -1)
        formats[kind] = next((number for number in tried if _opens(**{**_SURE, kind: number})), _SURE[kind])
    return Formats(**formats)


def _opens(ir: int, opset: int) -> bool:
    import onnxruntime as ort
    from onnx import TensorProto, helper
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "smallest", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except (errors.Fail, errors.InvalidGraph, errors.InvalidProtobuf, errors.NotImplemented):
        return False
    return True
