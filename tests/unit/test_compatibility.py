"""Test whether versions fit each other: rules on stacks that are made up, and what is found of this one."""

from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.pipeline.engines import check_software
from enginesmith.pipeline.engines.compatibility import Check, check_packages
from enginesmith.pipeline.engines.stack import find_stack
from enginesmith.pipeline.system import nvidia, software
from enginesmith.pipeline.system.nvidia import GpuState
from enginesmith.pipeline.system.software import Formats, Requirement, Stack, numbers

H100 = GpuState(
    name="NVIDIA H100", compute_capability="9.0", driver="580.65.06", compute_mode="default", pci_bus_id="0000:17:00.0"
)
ASKED = (Requirement("nvidia-cuda-runtime", "~=13.0", "cuda"), Requirement("nvidia-cudnn-cu13", "~=9.0", "cudnn"))
ALL_IS_WELL = Stack(
    driver="580.65.06",
    driver_cuda=(13, 0),
    gpus=(H100,),
    versions={"torch": "2.13.0", "onnxruntime-gpu": "1.31.1", "tensorrt": "10.13.3"},
    torch_cuda="13.0",
    torch_targets=("sm_80", "sm_90", "compute_90"),
    onnxruntime_cuda="13.0",
    cudnn="9.15.1.9",
    requirements={"torch": (Requirement("nvidia-cudnn-cu13", "==9.15.1.9", ""),), "onnxruntime-gpu": ASKED},
    packages={"nvidia-cuda-runtime": "13.0.96", "nvidia-cudnn-cu13": "9.15.1.9"},
    variants={"tensorrt": {13: ["tensorrt-cu13", "tensorrt-cu13-libs"]}},
    glibc="2.36",
    glibc_needed={"torch": "2.28"},
    written=Formats(ir=11, opset=24),
    taken=Formats(ir=11, opset=24),
)


def found(**change: Any) -> dict[str, Check]:
    listed = check_software(ALL_IS_WELL.model_copy(update=change), Formats(ir=11, opset=23))
    assert len({check.name for check in listed}) == len(listed)
    return {check.name: check for check in listed}


def gpu(**change: Any) -> dict[str, Any]:
    return {"gpus": (H100.model_copy(update=change),)}


def test_what_fits_needs_no_fix() -> None:
    verdicts = found()
    assert [check.name for check in verdicts.values() if not check.ok] == []
    assert not any(check.fix or check.note for check in verdicts.values())
    assert {"driver for torch", "cuDNN", "C library", "ONNX format", "tensorrt on cuda:0"} < set(verdicts)


@pytest.mark.parametrize(
    ("change", "name", "fix"),
    [
        ({"driver_cuda": (12, 4), "driver": "550.54"}, "driver for torch", "apt-get install nvidia-driver-580"),
        (
            {"driver_cuda": (12, 4), "driver": "550.54", "torch_cuda": "12.8"},
            "driver for tensorrt",
            "pip install tensorrt-cu12",
        ),
        ({"driver_cuda": None, "gpus": (), "gpu_without_driver": True}, "driver for torch", "nvidia-driver-580"),
        (gpu(compute_mode="exclusive process"), "compute mode of cuda:0", "nvidia-smi -i 0000:17:00.0 -c DEFAULT"),
        (gpu(driver=None), "state of cuda:0", "NVIDIA_DRIVER_CAPABILITIES"),
        ({"torch_cuda": None}, "torch", "pip uninstall -y torch && pip install torch"),
        ({"torch_targets": ("sm_80", "sm_100")}, "torch's kernels for cuda:0", "pip install --upgrade torch"),
        ({"packages": {}}, "CUDA libraries of torch", "pip install 'nvidia-cudnn-cu13==9.15.1.9'"),
        ({"packages": {}}, "CUDA libraries of onnxruntime-gpu", "'onnxruntime-gpu[cuda,cudnn]==1.31.1'"),
        ({"torch_cuda": "12.8"}, "CUDA of torch and onnxruntime-gpu", "'onnxruntime-gpu[cuda,cudnn]==1.31.1'"),
        ({"cudnn": "8.9.7"}, "cuDNN", "pip install 'nvidia-cudnn-cu13==9.*'"),
        ({"cudnn": None}, "cuDNN", "pip install 'nvidia-cudnn-cu13==9.*'"),
        (
            {"versions": {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}},
            "packages of ONNX Runtime",
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu",
        ),
        ({"taken": Formats(ir=10, opset=22)}, "ONNX format", "pip install --upgrade onnxruntime-gpu"),
        (
            {"variants": {"tensorrt": {12: ["tensorrt-cu12"], 13: ["tensorrt-cu13"]}}},
            "packages of tensorrt",
            "pip uninstall -y tensorrt tensorrt-cu12 tensorrt-cu13 && pip install tensorrt-cu13",
        ),
        (
            {"requirements": {"tensorrt-cu13": (Requirement("tensorrt-cu13-libs", "==10.13.3", ""),)}},
            "parts of tensorrt",
            "pip install --force-reinstall tensorrt-cu13",
        ),
        ({"variants": {"tensorrt-rtx": {13: ["tensorrt-rtx-cu13"]}}}, "tensorrt-rtx on cuda:0", "install tensorrt:"),
        (gpu(compute_capability="7.0"), "tensorrt on cuda:0", "pip install onnxruntime-gpu"),
        ({"glibc": "2.17"}, "C library", "pip install --force-reinstall torch"),
    ],
)
def test_what_does_not_fit_has_a_fix(change: dict[str, Any], name: str, fix: str) -> None:
    check = found(**change)[name]
    assert check.ok is False
    assert fix in check.fix


def test_tensorrt_for_an_older_cuda_is_no_way_out_where_torch_needs_the_driver() -> None:
    assert "cu12" not in found(driver_cuda=(12, 4), driver="550.54")["driver for tensorrt"].fix


def test_without_a_gpu_nothing_is_wrong() -> None:
    verdicts = found(driver_cuda=None, driver=None, driver_reason="there is no CUDA driver", gpus=(), torch_cuda=None)
    assert not [check for check in verdicts.values() if check.ok is False]
    assert (verdicts["torch"].ok, verdicts["torch"].note) == (None, "there is no NVIDIA GPU here")
    assert verdicts["driver for tensorrt"].found == "there is no CUDA driver"


def test_a_driver_of_the_same_major_version_will_do() -> None:
    check = found(driver_cuda=(12, 0), driver="525.60.13", torch_cuda="12.8")["driver for torch"]
    assert check.ok
    assert "PTX" in check.note
    newer = found(driver_cuda=(14, 0), driver="610.10")
    assert newer["driver for torch"].ok
    tensorrt = {"tensorrt": {12: ["tensorrt-cu12"]}}
    assert found(driver_cuda=(12, 0), driver="525.60.13", variants=tensorrt)["driver for tensorrt"].ok is False


@pytest.mark.parametrize(
    ("capability", "targets", "fits"),
    [
        ("9.0", ("sm_80",), False),
        ("8.6", ("sm_80",), True),
        ("8.0", ("sm_86",), False),
        ("12.0", ("sm_90", "compute_90"), True),
        ("9.0", ("sm_90a",), True),
        ("12.1", ("sm_90a", "compute_90a"), False),
    ],
)
def test_kernels_run_within_a_major_version(capability: str, targets: tuple[str, ...], fits: bool) -> None:
    check = found(torch_targets=targets, **gpu(compute_capability=capability))["torch's kernels for cuda:0"]
    assert check.ok is fits


def test_libraries_may_come_from_the_system() -> None:
    assert "CUDA libraries of onnxruntime-gpu" not in found(packages={}, loadable=("libcudart.so.13",))


def test_what_cannot_be_known_says_so() -> None:
    assert "does not say" in found(onnxruntime_cuda=None)["CUDA libraries of onnxruntime-gpu"].note
    provider = found(versions={**ALL_IS_WELL.versions, "tensorrt": "11.4.0"})["TensorRT provider of onnxruntime-gpu"]
    assert provider.ok is None
    assert "in another environment" in provider.note


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("9.15.1.9", "==9.15.1.9", True),
        ("9.15.1.8", "==9.15.1.9", False),
        ("13.0.96", "~=13.0", True),
        ("12.9", "~=13.0", False),
        ("14.0", "~=13.0", False),
        ("12.9", ">=12,<13", True),
        ("13.0", ">=12, <13", False),
        ("9.1", "==9.*", True),
        ("9.1", "", True),
    ],
)
def test_versions_are_held_against_what_is_asked(version: str, wanted: str, fits: bool) -> None:
    stack = Stack(packages={"a": version})
    assert check_packages(stack, "libraries", [Requirement("a", wanted, "")]).ok is fits


def test_numbers_leave_labels_out() -> None:
    assert (numbers("2.13.0+cu130"), numbers("1.7.1.116"), numbers("1.0rc1")) == ((2, 13, 0), (1, 7, 1, 116), (1, 0))
    assert numbers("10.14.1.48.post1") == (10, 14, 1, 48)


def test_builds_are_read_from_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi/build_and_package_info.py").write_text("package_name = 'x'\ncuda_version = '13.0.1'\n")
    module = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(nvidia.importlib.util, "find_spec", lambda package: module)
    file = "capi/build_and_package_info.py"
    found = [nvidia.cuda_of(*build) for build in (("torch", "version.py"), ("onnxruntime", file))]
    assert found == ["13.0", "13.0.1"]
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\n")
    (tmp_path / "capi/build_and_package_info.py").write_text("package_name = 'x'\n")
    assert (nvidia.cuda_of("torch", "version.py"), nvidia.cuda_of("onnxruntime", file)) == (None, None)


def test_requirements_with_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        "numpy",
        'nvidia-cudnn-cu13~=9.0; extra == "cudnn"',
        "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'",
    ]
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: listed)
    assert software.requirements("torch") == [
        ("nvidia-cudnn-cu13", "~=9.0", "cudnn"),
        ("nvidia-nccl-cu13", "==2.28.9", ""),
    ]
    assert software.requirements("a-package-that-is-not-here") == []


def test_this_stack_fits() -> None:
    here = find_stack()
    assert here.versions["torch"]
    assert here.taken
    assert here.taken.opset >= 23
    assert not [check for check in check_software(here, Formats(ir=11, opset=23)) if check.ok is False]
