"""What TensorRT builds can be asked for: refused, noted, or effective; profiles; versions; targets."""

from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.engines.tensorrt import engine, versions
from enginesmith.pipeline.engines.tensorrt.builder import compute_capabilities
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT, TensorRTRTX
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, validate_options
from enginesmith.pipeline.engines.tensorrt.versions import NEEDS_DEVICE, capabilities
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.system.device import Availability
from enginesmith.pipeline.system.nvidia import CudaDevice
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec

RTX = capabilities("tensorrt_rtx", "1.7.1.116")
ENTERPRISE = capabilities("tensorrt", "11.4.0.106")
SET: dict[str, Any] = {
    "tactic_dram": 1 << 30,
    "tactic_shared_memory": 48 << 10,
    "optimization_level": 5,
    "aux_streams": 2,
    "tiling": "full",
    "sparse_weights": True,
    "weight_streaming": True,
    "strip_plan": True,
    "refit": True,
    "version_compatible": True,
    "hardware_compatibility": "ampere_plus",
    "tf32": False,
    "plugins": ("libmine.so",),
    "timing_cache": "mine.cache",
    "locked": True,
    "profiles": ("batch=1:1:1",),
    "host_code": True,
}
"""Each option at a value that is not its default."""
EFFECTIVE = {"tactic_shared_memory", "weight_streaming", "tf32", "plugins", "profiles"}


def test_every_option_of_the_rtx_flavour_is_effective_noted_or_refused() -> None:
    assert set(SET) == set(BuildOptions.model_fields)
    told = [set(RTX.no_effect), set(RTX.refused), set(NEEDS_DEVICE), EFFECTIVE]
    assert set().union(*told) == set(BuildOptions.model_fields)
    assert sum(map(len, told)) == len(BuildOptions.model_fields)


@pytest.mark.parametrize("name", sorted(RTX.no_effect))
def test_an_option_without_effect_is_noted(name: str) -> None:
    (note,) = validate_options(BuildOptions(**{name: SET[name]}), "tensorrt_rtx", RTX, device=False)
    assert note == f"--{name.replace('_', '-')} has no effect in tensorrt_rtx: {RTX.no_effect[name]}"


@pytest.mark.parametrize("name", sorted({*RTX.refused, *NEEDS_DEVICE}))
def test_an_option_that_cannot_be_had_is_refused(name: str) -> None:
    with pytest.raises(MissingCapability, match=f"--{name.replace('_', '-')}") as caught:
        validate_options(BuildOptions(**{name: SET[name]}), "tensorrt_rtx", RTX, device=False)
    assert ("a machine with a GPU" in caught.value.remedy) == (name in NEEDS_DEVICE)


@pytest.mark.parametrize("name", sorted(NEEDS_DEVICE))
def test_what_needs_a_device_is_taken_where_there_is_one(name: str) -> None:
    assert validate_options(BuildOptions(**{name: True}), "tensorrt_rtx", RTX, device=True) == ()


def test_what_the_flavour_lacks_is_refused_with_a_device_too() -> None:
    with pytest.raises(MissingCapability, match="--version-compatible"):
        validate_options(BuildOptions(version_compatible=True), "tensorrt_rtx", RTX, device=True)


@pytest.mark.parametrize("name", sorted(SET))
def test_the_enterprise_flavour_takes_every_option_on_a_device(name: str) -> None:
    assert validate_options(BuildOptions(**{name: SET[name]}), "tensorrt", ENTERPRISE, device=True) == ()


@pytest.mark.parametrize("known", [RTX, ENTERPRISE])
def test_defaults_are_taken_without_a_note(known: versions.Capabilities) -> None:
    assert validate_options(BuildOptions(), "tensorrt_rtx", known, device=False) == ()


def test_asked_holds_what_is_not_the_default() -> None:
    assert BuildOptions().asked == {}
    assert BuildOptions(**SET).asked == SET
    assert BuildOptions(tiling="FAST").tiling == "fast"


SIGNATURE = Signature(
    inputs=(TensorSpec.parse("ids:int64:batch,seq"), TensorSpec.parse("scale:float32:3")),
    outputs=(TensorSpec.parse("y:float32:batch,seq,3"),),
)
RANGES = {"batch": ShapeRange(min=1, opt=8, max=64), "seq": ShapeRange(min=16, opt=128, max=512)}
WHOLE = {"ids": ((1, 16), (8, 128), (64, 512)), "scale": ((3,), (3,), (3,))}


def test_the_whole_range_is_the_only_profile_unless_more_are_named() -> None:
    assert engine.plan(SIGNATURE, RANGES, ()) == (WHOLE,)


def test_named_profiles_come_first_and_keep_the_other_dimensions() -> None:
    first, second, last = engine.plan(SIGNATURE, RANGES, ("batch=1:1:1", "batch=2:4:8,seq=64"))
    assert first["ids"] == ((1, 16), (1, 128), (1, 512))
    assert second["ids"] == ((2, 64), (4, 64), (8, 64))
    assert last == WHOLE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("width=1:2:3", "'width', and the dynamic dimensions are batch, seq"),
        ("batch", "'batch'"),
        ("batch=1:2:65", "goes beyond the range batch=1:8:64"),
        ("seq=15:16:17", "goes beyond the range seq=16:128:512"),
        ("batch=8:4:1", "out of order"),
    ],
)
def test_profiles_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.plan(SIGNATURE, RANGES, (text,))


def test_a_dimension_without_a_range_is_refused() -> None:
    with pytest.raises(UsageError, match="'seq' has no range") as caught:
        engine.plan(SIGNATURE, {"batch": RANGES["batch"]}, ())
    assert "--shape seq=MIN:OPT:MAX" in caught.value.remedy


@pytest.mark.parametrize(
    ("found", "ok"),
    [("10.13.3.9", True), ("11.4.0.106", True), ("10.12.0", False), ("8.6.1", False), ("12.0.0", False)],
)
def test_versions_that_are_not_known_are_not_used(found: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda flavour: found)
    monkeypatch.setattr(versions.importlib, "import_module", lambda name: None)
    answer = versions.importable("tensorrt")
    assert answer.ok == ok
    assert ok or (found in answer.reason and "tensorrt>=10.13" in answer.remedy)


def test_a_package_that_is_not_there_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda flavour: None)
    with pytest.raises(MissingCapability, match="tensorrt-rtx is not installed") as caught:
        versions.module("tensorrt_rtx")
    assert "pip install tensorrt-rtx" in caught.value.remedy


def test_a_package_whose_libraries_do_not_load_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(versions, "installed_version", lambda flavour: "11.4.0")
    monkeypatch.setattr(versions.importlib, "import_module", fail)
    answer = versions.importable("tensorrt")
    assert not answer.ok
    assert "libnvinfer.so.11" in answer.reason


def test_the_newest_row_stands_for_versions_that_are_not_known() -> None:
    assert capabilities("tensorrt", "13.0") == ENTERPRISE


@pytest.mark.parametrize(
    ("target", "expected"), [("sm86", ("sm86",)), ("portable", ("sm80", "sm86", "sm89", "sm120", "sm121")), (None, ())]
)
def test_a_target_stands_for_compute_capabilities(target: str | None, expected: tuple[str, ...]) -> None:
    assert compute_capabilities(target, RTX) == expected


AMPERE = CudaDevice(name="NVIDIA A10", compute_capability=(8, 6))
HOPPER = CudaDevice(name="NVIDIA H100", compute_capability=(9, 0))


@pytest.mark.parametrize(
    ("engine", "here", "expected"),
    [
        (TensorRTRTX(target="sm89"), None, ("sm89",)),
        (TensorRTRTX(), AMPERE, ("sm86",)),
        (TensorRTRTX(target="sm89"), AMPERE, ("sm89",)),
        (TensorRT(), AMPERE, ()),
        (TensorRT(target="sm86"), AMPERE, ()),
    ],
)
def test_the_builder_is_told_the_target_or_the_device(
    engine: TensorRT, here: CudaDevice | None, expected: tuple[str, ...]
) -> None:
    assert engine.targets(here) == expected


@pytest.mark.parametrize(
    ("engine", "here", "error", "message"),
    [
        (TensorRTRTX(), None, UsageError, "needs a target"),
        (TensorRTRTX(target="sm90"), None, UsageError, "no target 'sm90'"),
        (TensorRTRTX(), HOPPER, MissingCapability, "no target sm90 \\(NVIDIA H100\\)"),
        (TensorRT(target="sm86"), None, UsageError, "builds for the device that is here"),
        (TensorRT(target="sm86"), HOPPER, UsageError, "builds for the device that is here"),
    ],
)
def test_targets_that_cannot_be_had(
    engine: TensorRT, here: CudaDevice | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.targets(here)


@pytest.mark.parametrize(("target", "ok"), [("sm86", True), ("portable", True), ("sm89", False), (None, True)])
def test_an_engine_runs_where_its_target_is(target: str | None, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginesmith.pipeline.system import nvidia
    from enginesmith.pipeline.system.device import Device

    monkeypatch.setattr(TensorRTRTX, "available", classmethod(lambda cls, device: Availability(ok=True)))
    monkeypatch.setattr(nvidia, "cuda_device", lambda index: AMPERE)
    found = TensorRTRTX(target=target).runnable(Device(kind="cuda"))
    assert found.ok == ok
    assert ok or ("sm89" in found.reason and "--target sm86" in found.remedy)


def test_engines_of_a_named_target_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from enginesmith.pipeline.system import nvidia
    from enginesmith.pipeline.system.device import Device

    monkeypatch.setattr(nvidia, "cuda_device", lambda index: AMPERE)
    where = Device(kind="cuda")
    assert TensorRTRTX(target="sm89").environment_key(where) == {}
    assert TensorRTRTX().environment_key(where)["device"]["name"] == "NVIDIA A10"
    assert TensorRT(target="sm86").environment_key(where)["device"]["name"] == "NVIDIA A10"


def test_a_plugin_library_that_was_changed_changes_the_surroundings(tmp_path: Path) -> None:
    from enginesmith.pipeline.system.device import Device

    library = tmp_path / "nms.so"
    engine = TensorRTRTX(target="sm86", options=BuildOptions(plugins=(str(library),)))
    where = Device(kind="cuda")
    found = [engine.environment_key(where)]
    for content in (b"one", b"two", b"one"):
        library.write_bytes(content)
        found.append(engine.environment_key(where))
    gone, first, changed, again = found
    assert gone == {}  # which the build itself refuses
    assert first == again
    assert first != changed
    assert TensorRTRTX(target="sm86").environment_key(where) == {}
