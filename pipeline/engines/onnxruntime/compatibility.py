"""Check whether ONNX Runtime, its CUDA libraries and exported models fit each other."""

from collections.abc import Iterator

from enginesmith.pipeline.engines.compatibility import Check, check, check_driver, check_packages
from enginesmith.pipeline.system.software import Formats, Stack, numbers

_TENSORRT_OF_ONNXRUNTIME = 10
"""libnvinfer's major version that the TensorRT provider of onnxruntime-gpu is linked against (up to 1.31)."""
_CUDNN_OF_ONNXRUNTIME = 9


def check_software(stack: Stack, exported: Formats) -> Iterator[Check]:
    """Check ONNX Runtime's driver, packages and CUDA libraries, and the ONNX format that it takes."""
    yield from check_driver(stack, "onnxruntime-gpu", stack.onnxruntime_cuda)
    yield from _builds(stack)
    yield from _formats(stack, exported)


def _builds(stack: Stack) -> Iterator[Check]:
    names = [name for name in ("onnxruntime", "onnxruntime-gpu") if name in stack.versions]
    if len(names) > 1:
        fix = f"pip uninstall -y {' '.join(names)} && pip install {names[1] if stack.gpus else names[0]}"
        needed = "one of them: they overwrite each other"
        yield check("packages of ONNX Runtime", " and ".join(names), needed, False, fix)
    if "onnxruntime-gpu" not in names:
        return
    yield from _libraries_of_onnxruntime(stack)
    tensorrt = stack.versions.get("tensorrt")
    if tensorrt and numbers(tensorrt)[0] != _TENSORRT_OF_ONNXRUNTIME:
        needed, theirs = f"libnvinfer {_TENSORRT_OF_ONNXRUNTIME}", f"'tensorrt=={_TENSORRT_OF_ONNXRUNTIME}.*'"
        note = f"not used here, where TensorRT builds engines itself; other programs: pip install {theirs}"
        yield check("TensorRT provider of onnxruntime-gpu", f"tensorrt {tensorrt}", needed, None, note=note)


def _libraries_of_onnxruntime(stack: Stack) -> Iterator[Check]:
    """Check the CUDA libraries, which its metadata names under two extras; torch may bring the same ones."""
    fix = f"pip install 'onnxruntime-gpu[cuda,cudnn]=={stack.versions['onnxruntime-gpu']}'"
    asked = [one for one in stack.requirements.get("onnxruntime-gpu", ()) if one.extra in ("cuda", "cudnn")]
    if stack.onnxruntime_cuda is None:
        why = "the package does not say which CUDA it is built for"
        yield check("CUDA libraries of onnxruntime-gpu", "unknown", "unknown", None, note=why)
        return
    major = numbers(stack.onnxruntime_cuda)[0]
    if stack.torch_cuda:
        found = f"{stack.torch_cuda} and {stack.onnxruntime_cuda}"
        same = numbers(stack.torch_cuda)[0] == major
        needed, other = "the same major version, to share libraries", f"a torch that is built for CUDA {major}"
        yield check("CUDA of torch and onnxruntime-gpu", found, needed, same, f"{fix}; or {other}")
    if asked and f"libcudart.so.{major}" not in stack.loadable:
        yield check_packages(stack, "CUDA libraries of onnxruntime-gpu", asked, fix)
    fits = stack.cudnn is not None and numbers(stack.cudnn)[0] == _CUDNN_OF_ONNXRUNTIME
    package = f"pip install 'nvidia-cudnn-cu{major}=={_CUDNN_OF_ONNXRUNTIME}.*'"
    yield check("cuDNN", stack.cudnn or "not found", f"{_CUDNN_OF_ONNXRUNTIME}.x", fits, package)


def _formats(stack: Stack, exported: Formats) -> Iterator[Check]:
    if stack.taken is None or stack.written is None:
        return
    found = f"ONNX Runtime takes IR {stack.taken.ir} and opset {stack.taken.opset}"
    needed = f"IR {exported.ir} and opset {exported.opset}, for exported models"
    fits = stack.taken.ir >= exported.ir and stack.taken.opset >= exported.opset
    package = "onnxruntime-gpu" if "onnxruntime-gpu" in stack.versions else "onnxruntime"
    ahead = stack.written.opset > stack.taken.opset or stack.written.ir > stack.taken.ir
    newest = f"the installed onnx writes up to IR {stack.written.ir} and opset {stack.written.opset}"
    note = f"{newest}: such files open in tools and not in ONNX Runtime" if ahead else ""
    yield check("ONNX format", found, needed, fits, f"pip install --upgrade {package}", note)
