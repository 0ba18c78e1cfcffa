"""Test what TensorRT builds can be asked for, and searches for workspace limits and the largest batch."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.tensorrt import builder, engine, versions
from enginesmith.pipeline.engines.tensorrt.builder import compute_capabilities
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT, TensorRTRTX
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, validate_options
from enginesmith.pipeline.engines.tensorrt.versions import NEEDS_DEVICE, Capabilities, capabilities
from enginesmith.pipeline.errors import LimitTooSmall, MissingCapability, ModelError, UsageError
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.system.nvidia import CudaDevice
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec
from enginesmith.pipeline.workflows.fit import largest

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


def test_an_engine_for_later_versions_has_host_code() -> None:
    """TensorRT's lean runtime, which `engine_host_code_allowed` lets a later version load."""
    options: dict[str, Any] = {"version_compatible": True}
    recipe: dict[str, Any] = {"model": "net.onnx", "engines": ["tensorrt"], "device": "cuda", "tensorrt": options}
    with pytest.raises(UsageError, match="--version-compatible puts a runtime into the engine") as caught:
        make(recipe)
    assert "--host-code" in caught.value.remedy
    options["host_code"] = True
    assert make(recipe).tensorrt.host_code


@pytest.mark.parametrize("name", sorted(SET))
def test_the_enterprise_flavour_takes_every_option_on_a_device(name: str) -> None:
    assert validate_options(BuildOptions(**{name: SET[name]}), "tensorrt", ENTERPRISE, device=True) == ()


@pytest.mark.parametrize("known", [RTX, ENTERPRISE])
def test_defaults_are_taken_without_a_note(known: versions.Capabilities) -> None:
    assert validate_options(BuildOptions(), "tensorrt_rtx", known, device=False) == ()


def test_asked_holds_what_is_not_the_default() -> None:
    assert (BuildOptions().asked, BuildOptions(**SET).asked, BuildOptions(tiling="FAST").tiling) == ({}, SET, "fast")


SIGNATURE = Signature(
    inputs=(TensorSpec.parse("ids:int64:batch,seq"), TensorSpec.parse("scale:float32:3")),
    outputs=(TensorSpec.parse("y:float32:batch,seq,3"),),
)
RANGES = {"batch": ShapeRange(min=1, opt=8, max=64), "seq": ShapeRange(min=16, opt=128, max=512)}
WHOLE = {"ids": ((1, 16), (8, 128), (64, 512)), "scale": ((3,), (3,), (3,))}


def test_named_profiles_come_before_the_whole_range_and_keep_the_other_dimensions() -> None:
    assert engine.make_profiles(SIGNATURE, RANGES, ()) == (WHOLE,)
    first, second, last = engine.make_profiles(SIGNATURE, RANGES, ("batch=1:1:1", "batch=2:4:8,seq=64"))
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
        engine.make_profiles(SIGNATURE, RANGES, (text,))


def test_a_dimension_without_a_range_is_refused() -> None:
    with pytest.raises(UsageError, match="'seq' has no range") as caught:
        engine.make_profiles(SIGNATURE, {"batch": RANGES["batch"]}, ())
    assert "--shape seq=MIN:OPT:MAX" in caught.value.remedy


@pytest.mark.parametrize(
    ("found", "ok"),
    [("10.13.3.9", True), ("11.4.0.106", True), ("10.12.0", False), ("8.6.1", False), ("12.0.0", False)],
)
def test_versions_that_are_not_known_are_not_used(found: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda flavour: found)
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    answer = versions.importable("tensorrt")
    assert answer.ok == ok
    assert ok or (found in answer.reason and "tensorrt>=10.13" in answer.remedy)


def test_a_package_that_is_not_there_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda flavour: None)
    with pytest.raises(MissingCapability, match="tensorrt-rtx is not installed") as caught:
        versions.module("tensorrt_rtx")
    assert "pip install tensorrt-rtx" in caught.value.remedy


def test_a_package_whose_libraries_do_not_load_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(versions, "installed_version", lambda flavour: "11.4.0")
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
def test_the_builder_gets_a_target(engine: TensorRT, here: CudaDevice | None, expected: tuple[str, ...]) -> None:
    assert engine.targets(here) == expected


@pytest.mark.parametrize(
    ("engine", "here", "error", "message"),
    [
        (TensorRTRTX(), None, UsageError, "needs a target"),
        (TensorRTRTX(target="sm90"), None, UsageError, "no target 'sm90'\n.*use one of sm75"),
        (TensorRTRTX(), HOPPER, MissingCapability, "no target sm90 \\(NVIDIA H100\\)"),
        (TensorRT(target="sm86"), None, UsageError, "builds for the device that is here"),
        (TensorRT(target="sm86"), HOPPER, UsageError, "builds for the device that is here"),
    ],
)
def test_impossible_targets(engine: TensorRT, here: CudaDevice | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.targets(here)


@pytest.mark.parametrize(("target", "ok"), [("sm86", True), ("portable", True), ("sm89", False), (None, True)])
def test_an_engine_runs_where_its_target_is(target: str | None, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorRTRTX, "available", classmethod(lambda cls, device: Availability(ok=True)))
    monkeypatch.setattr(nvidia, "cuda_device", lambda index: AMPERE)
    found = TensorRTRTX(target=target).runnable(Device(kind="cuda"))
    assert found.ok == ok
    assert ok or ("sm89" in found.reason and "--target sm86" in found.remedy)


def test_engines_of_a_named_target_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "cuda_device", lambda index: AMPERE)
    where = Device(kind="cuda")
    assert TensorRTRTX(target="sm89").environment_key(where) == {}
    assert TensorRTRTX().environment_key(where)["device"]["name"] == "NVIDIA A10"
    assert TensorRT(target="sm86").environment_key(where)["device"]["name"] == "NVIDIA A10"


def test_a_plugin_library_that_was_changed_changes_the_surroundings(tmp_path: Path) -> None:
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


GATE = capabilities("tensorrt_rtx", "1.7.1")
TIMED = capabilities("tensorrt", "11.4.0")
KIB, MIB = 1 << 10, 1 << 20


class Builder:
    """Builds from some limit on, and remembers the limits it was given."""

    def __init__(self, need: int) -> None:
        self.need, self.limits = need, list[int]()

    def __call__(self, limit: int) -> None:
        self.limits.append(limit)
        if limit < self.need:
            raise LimitTooSmall(f"{limit}")


def facts(
    activation: int | None = 74 * MIB,
    weights: int | None = 51 * MIB,
    scratch: int | None = None,
    limit: int | None = None,
) -> EngineFacts:
    return EngineFacts(
        activation_bytes=activation, weights_bytes=weights, scratch_bytes=scratch, workspace_limit_bytes=limit
    )


def test_the_estimate_is_the_activations_beyond_the_weights() -> None:
    assert builder.estimate(facts(74 * MIB, 51 * MIB)) == 23 * MIB + 32 * KIB
    assert builder.estimate(facts(5 * MIB, 9 * MIB)) == 1
    assert builder.estimate(facts(9 * MIB, 9 * MIB)) == 1


@pytest.mark.parametrize("given", [facts(activation=None), facts(weights=None)])
def test_without_figures_there_is_nothing_to_sweep(given: EngineFacts) -> None:
    with pytest.raises(ModelError, match="no memory figures"):
        builder.estimate(given)


def test_points_lie_evenly_on_a_log_scale_up_to_the_activations() -> None:
    found = builder.space_workspaces(facts(64 * MIB), 4 * MIB, 5)
    assert found == (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
    # a tiny smallest limit does not stretch the scale
    first, second, *_, last = builder.space_workspaces(facts(16 * MIB), 1, 5)
    assert (first, second, last) == (1, 2 * MIB, 16 * MIB)


@pytest.mark.parametrize("activation", [None, 0, 4 * MIB])
def test_points_are_in_order_where_there_is_no_room_above(activation: int | None) -> None:
    found = builder.space_workspaces(facts(activation), 4 * MIB, 5)
    assert found[0] == 4 * MIB
    assert list(found) == sorted(found)
    assert builder.space_workspaces(facts(activation), 4 * MIB, 1) == (4 * MIB,)


ESTIMATED = 23 * MIB + 32 * KIB


@pytest.mark.parametrize(
    ("need", "given", "least"),
    [*((ESTIMATED - spare * KIB, facts(), ESTIMATED) for spare in (32, 25, 16)), (1, facts(5 * MIB, 9 * MIB), 1)],
)
def test_a_gate_is_found_with_one_build_where_the_estimate_holds(need: int, given: EngineFacts, least: int) -> None:
    build = Builder(need)
    assert builder.find_smallest_workspace(build, given, GATE) == least
    assert len(build.limits) == 1


@pytest.mark.parametrize("need", [24 * MIB, 60 * MIB, 300 * MIB])
def test_a_gate_is_searched_where_the_estimate_is_too_low(need: int) -> None:
    build = Builder(need)
    found = builder.find_smallest_workspace(build, facts(), GATE)
    assert need <= found <= need + 64 * KIB
    assert build.limits[-1] == found


@pytest.mark.parametrize("known", [GATE, TIMED], ids=["gate", "timed"])
@pytest.mark.parametrize("need", [24 * MIB, 60 * MIB, 99 * MIB, 100 * MIB])
def test_no_limit_above_one_that_is_known_to_be_enough_is_tried(known: Capabilities, need: int) -> None:
    build = Builder(need)
    found = builder.find_smallest_workspace(build, facts(scratch=23 * MIB, limit=100 * MIB), known)
    assert need <= found <= max(need + 64 * KIB, need / 0.95 + 1)
    assert max(build.limits) <= 100 * MIB
    assert build.limits[-1] == found


@pytest.mark.parametrize("seed", range(5))
def test_a_timed_flavour_is_searched_from_both_sides(seed: int) -> None:
    rng = random.Random(seed)
    need = rng.randrange(1, 4 << 30)
    build = Builder(need)
    found = builder.find_smallest_workspace(
        build, facts(scratch=rng.choice([None, 1, need // 7 + 1, need, 3 * need])), TIMED
    )
    assert need <= found <= max(need + 64 * KIB, need / 0.95 + 1)
    assert build.limits[-1] == found
    assert len(build.limits) < 60


def test_failures_of_another_kind_are_not_taken_for_a_limit() -> None:
    def build(limit: int) -> None:
        raise ModelError("the graph is broken")

    with pytest.raises(ModelError, match="broken"):
        builder.find_smallest_workspace(build, facts(), GATE)


def counted(need: Callable[[int], int]) -> tuple[Callable[[int], int], set[int]]:
    asked: set[int] = set()

    def ask(batch: int) -> int:
        assert batch >= 1
        asked.add(batch)
        return need(batch)

    return ask, asked


def test_the_largest_batch_is_the_one_that_trying_all_finds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        most = rng.choice([1, 2, 3, 17, 300])
        steps = [rng.choice([0, 0, 1, 5, rng.randrange(1000)]) for _ in range(most)]
        needs = [sum(steps[: index + 1]) for index in range(most)]
        limit = rng.randrange(-1, needs[-1] + 5)
        expected = max((index + 1 for index, need in enumerate(needs) if need <= limit), default=None)
        ask, asked = counted(lambda batch, needs=needs: needs[batch - 1])
        assert largest(ask, limit, most) == expected
        assert max(asked) <= most


@pytest.mark.parametrize("fits", [1, 2, 63, 4097, 65535, 65536])
def test_needs_that_grow_in_a_line_are_found_with_few_builds(fits: int) -> None:
    ask, asked = counted(lambda batch: 1000 + 77 * batch)
    assert largest(ask, 1000 + 77 * fits + 5) == fits
    assert len(asked) <= 6


def test_nothing_fits_where_batch_one_does_not() -> None:
    ask, asked = counted(lambda batch: 100 * batch)
    assert largest(ask, 99) is None
    assert asked == {1}


@pytest.mark.parametrize(
    "need",
    [lambda b: b * b, lambda b: 1000 + 4096 * -(-b * 1000 // 4096), lambda b: 10 * b if b <= 4 else 40 + 100 * (b - 4)],
    ids=["quadratic", "in pages", "bent"],
)
def test_needs_that_grow_unevenly_are_found_with_few_builds(need: Callable[[int], int]) -> None:
    ask, asked = counted(need)
    assert largest(ask, 10**6) == max(b for b in range(1, 1 << 16) if need(b) <= 10**6)
    assert len(asked) <= 20


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_tensorrt_rtx_names_tensorrt_on_a_gpu_that_is_no_target(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = CudaDevice(name="NVIDIA B200", compute_capability=capability)
    monkeypatch.setattr(nvidia, "available", lambda *_: Availability(ok=True))
    monkeypatch.setattr(nvidia, "cuda_device", lambda index: shown)
    monkeypatch.setattr(versions, "importable", lambda *_, **__: Availability(ok=True))
    answer = TensorRTRTX.available(Device(kind="cuda"))
    assert answer.reason == f"TensorRT-RTX has no target sm{capability[0]}{capability[1]} (NVIDIA B200)"
    assert "--engine tensorrt: pip install" in answer.remedy
