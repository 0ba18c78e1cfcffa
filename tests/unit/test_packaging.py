"""Packages of a run that nobody had to make: choosing, refusing, what is written, and the script that is run last."""

import errno
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packaged_runs
from enginesmith.pipeline.artifact import file_digest
from enginesmith.pipeline.engines.tensorrt.engine import TensorRTRTX
from enginesmith.pipeline.errors import ModelError, StoreError, UsageError
from enginesmith.pipeline.frameworks.rounding import COARSE, FINE, Draw, make_records
from enginesmith.pipeline.frameworks.samples import Vector, save_vector
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.results import remeasure
from enginesmith.pipeline.results.package import manifest, verify
from enginesmith.pipeline.results.package import package as bundle
from enginesmith.pipeline.results.package.package import package
from enginesmith.pipeline.system.device import Availability
from packaged_runs import ExampleRun

made, no_script, with_script = packaged_runs.made, packaged_runs.no_script, packaged_runs.with_script  # fixtures


def test_a_bundle_holds_what_it_needs_and_names_everything(made: ExampleRun, tmp_path: Path) -> None:
    found = package(made.write(), "bundle", tmp_path / "b")
    assert found.files == ("infer.py", "manifest.json", "model.onnx", "test_vector.npz")
    kept = manifest.read(tmp_path / "b")
    assert set(kept.files) == set(found.files) - {"manifest.json"}
    assert kept.files["model.onnx"].sha256 == file_digest(tmp_path / "b/model.onnx")
    assert kept.engine.options["session"]["providers"] == ["CPUExecutionProvider"]
    assert (kept.origin.model, kept.origin.processor) == ("net.py:build", "a CPU")
    assert kept.measured.latency[1].throughput_per_s == 40
    assert kept.preprocessing.notes == ("the run fed 2 sets of feeds",)
    assert found.manifest_sha256 == file_digest(tmp_path / "b/manifest.json")


def test_the_same_run_gives_the_same_bytes(made: ExampleRun, tmp_path: Path) -> None:
    run = made.write()
    for form in ("bundle", "triton"):
        one, two = package(run, form, tmp_path / f"{form}-1"), package(run, form, tmp_path / f"{form}-2")
        assert one.manifest_sha256 == two.manifest_sha256


def test_a_bundle_without_samples_has_a_made_up_vector(made: ExampleRun, tmp_path: Path) -> None:
    sample = {"input:x": np.array([[7, 9, 5, 0]], np.float32), "output:y": np.array([[0, 9, 10, 0]], np.float32)}
    np.savez(tmp_path / "run/test_vector.npz", **sample)
    made.vector = made.vector.model_copy(update={"sha256": file_digest(tmp_path / "run/test_vector.npz")})
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
    done = package(made.write(), "bundle", tmp_path / "b", keep_samples=False)
    assert any("made-up input" in text for text in done.cautions)
    kept = dict(np.load(tmp_path / "b/test_vector.npz"))
    assert not np.isin(kept["input:x"], [7, 9, 5, 0]).any()
    np.testing.assert_allclose(kept["output:y"], kept["input:x"] * np.arange(4))
    assert verify.verify(tmp_path / "b")[1].passed


@pytest.mark.parametrize(
    ("sample", "values"),
    [
        (np.array([[3, 900]]), {*range(3, 901)}),
        (np.array([True, False]), {True, False}),
        (np.zeros((0, 3)), set()),
        (np.array(4, np.int64), {4}),
    ],
)
def test_made_up_values_stay_in_range(sample: Any, values: set[Any]) -> None:
    drawn = bundle._make_up(sample)
    assert (drawn.dtype, drawn.shape) == (sample.dtype, sample.shape)
    assert {*drawn.ravel().tolist()} <= values


@pytest.mark.parametrize(
    ("changes", "variant", "said"),
    [
        ({"winner": None, "winner_reason": "none is fast enough"}, None, "none is fast enough"),
        ({}, "onnxruntime-fp23", "did you mean onnxruntime-fp32"),
        ({}, "eager", "takes the code that makes it"),
        ({"variants": ()}, None, "no winner"),
        ({"variants": (), "winner": None, "complete": False}, None, "no engine is built: `enginesmith resume .*` goes"),
    ],
)
def test_wrong_choices_are_said(
    changes: dict[str, Any], variant: str | None, said: str, made: ExampleRun, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        package(made.write(**changes), "bundle", tmp_path / "b", variant)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("form", ["bundle", "triton"])
def test_the_next_command_can_be_pasted(form: Any, made: ExampleRun, tmp_path: Path) -> None:
    odd = tmp_path / "two words 'quoted'"
    said = package(made.write(), form, odd).next
    assert any(str(odd) in word for word in shlex.split(said))


def test_a_run_from_before_graphs_were_kept_can_be_resumed(made: ExampleRun, tmp_path: Path) -> None:
    made.variants = [made.record("onnxruntime-fp32", artifact=made.graph)]
    with pytest.raises(UsageError, match="enginesmith resume"):
        package(made.write(), "bundle", tmp_path / "b")


def test_the_file_that_was_given_is_no_variant_to_package(made: ExampleRun, tmp_path: Path) -> None:
    """It is the winner where no variant of an ONNX file is faster than the file itself."""
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=None)]
    with pytest.raises(UsageError, match=r"is the ONNX file that the run was given, .*\n.*use that file as it is"):
        package(made.write(), "bundle", tmp_path / "b")


def test_a_failed_variant_is_packaged_by_name_with_a_caution(made: ExampleRun, tmp_path: Path) -> None:
    fields = {"graph": made.graph, "artifact": made.graph, "status": "failed", "reason": "too far from eager"}
    made.variants.append(made.record("onnxruntime-int8", **fields, rejected="of unknown loss"))
    found = package(made.write(), "bundle", tmp_path / "b", "onnxruntime-int8")
    assert "it failed in the run: too far from eager" in found.cautions
    assert "it was rejected: of unknown loss" in found.cautions
    assert any("not the run's winner" in text for text in found.cautions)
    assert any("it failed" in text for text in manifest.read(tmp_path / "b").cautions)


def test_the_manifest_states_no_speed_up_that_is_too_noisy(made: ExampleRun, tmp_path: Path) -> None:
    wide, narrow = Interval(median=500.0, low=20.0, high=1100.0), Interval(median=4.0, low=3.9, high=4.1)
    rows = [LatencyRow(batch=batch, p50_ms=1.0, speedup=speedup) for batch, speedup in ((1, wide), (8, narrow))]
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph, latency=tuple(rows))]
    package(made.write(), "bundle", tmp_path / "b")
    noisy, clear = manifest.read(tmp_path / "b").measured.latency
    assert (noisy.speedup, noisy.reasons["speedup"]) == (None, "too noisy to tell")
    assert (clear.speedup, "speedup" in clear.reasons) == (4.0, False)


@pytest.mark.usefixtures("with_script")
def test_packaging_ends_with_the_script_of_the_bundle(made: ExampleRun, tmp_path: Path) -> None:
    made.variants.append(made.engine("tensorrt_rtx"))
    run = made.write()
    assert package(run, "bundle", tmp_path / "b").check == "its answers match the test vector"
    elsewhere = package(run, "bundle", tmp_path / "rtx", "tensorrt_rtx-fp16").check
    assert elsewhere.startswith("not run: ")
    assert "made with tensorrt_rtx 10.14.1 for cuda" in elsewhere
    np.savez(tmp_path / "run/test_vector.npz", **{"input:x": np.ones((1, 4), "f"), "output:y": np.ones((1, 4), "f")})
    made.vector = made.vector.model_copy(update={"sha256": file_digest(tmp_path / "run/test_vector.npz")})
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
    with pytest.raises(ModelError, match="y does not match the test vector"):
        package(made.write(), "bundle", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    made.variants = [made.variants[0].model_copy(update={"status": "failed", "reason": "too far from eager"})]
    assert "does not match" in package(made.write(), "bundle", tmp_path / "named", "onnxruntime-fp32").check


@pytest.mark.usefixtures("with_script")
def test_a_script_that_fails_where_the_engine_can_run_is_an_error(
    made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "infer.py"
    made.variants.append(made.engine("tensorrt_rtx"))
    monkeypatch.setattr(TensorRTRTX, "infer_script", classmethod(lambda kind: script))
    monkeypatch.setattr(TensorRTRTX, "runnable", lambda engine, device: Availability(ok=True))
    script.write_text("print('error: it is built for sm90', file=__import__('sys').stderr); raise SystemExit(4)")
    found = package(made.write(), "bundle", tmp_path / "elsewhere", "tensorrt_rtx-fp16").check
    assert found == "not run: it is built for sm90"
    script.write_text("raise SystemExit('error: the engine did not run')")
    with pytest.raises(ModelError, match="does not run this bundle: the engine did not run"):
        package(made.write(), "bundle", tmp_path / "here", "tensorrt_rtx-fp16")


@pytest.mark.usefixtures("with_script")
def test_the_script_judges_an_answer_near_zero_by_the_range_of_all(made: ExampleRun, tmp_path: Path) -> None:
    """A rounding error may be half of a single small number, and almost nothing of the range."""
    vector = tmp_path / "run/test_vector.npz"
    answers = np.float32([[0, 1, 2, 1.5]])
    for known, status in ((0.0, "differs"), (1e6, "matches")):
        save_vector(vector, Vector({"x": np.ones((1, 4), np.float32)}, {"y": answers}, {"y": known}, {}))
        made.vector = made.vector.model_copy(update={"sha256": file_digest(vector)})
        made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
        if status == "differs":
            with pytest.raises(ModelError, match="y does not match the test vector"):
                package(made.write(), "bundle", tmp_path / status)
            continue
        assert package(made.write(), "bundle", tmp_path / status).check == "its answers match the test vector"
        assert verify.verify(tmp_path / status)[1].passed


@pytest.mark.usefixtures("with_script")
def test_the_script_allows_what_rounding_moves_the_reference_by(made: ExampleRun, tmp_path: Path) -> None:
    vector, inputs = tmp_path / "run/test_vector.npz", {"x": np.ones((1, 4), np.float32)}
    for moved in (1e-6, 1e-2):
        wanted = {"y": np.float32([[0, 1, 2, 3.001]])}
        save_vector(vector, Vector(inputs, wanted, {"y": 1.0}, {}, {"y": moved}))
        made.vector = made.vector.model_copy(update={"sha256": file_digest(vector)})
        made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
        if moved < 1e-3:
            with pytest.raises(ModelError, match="y does not match the test vector"):
                package(made.write(), "bundle", tmp_path / str(moved))
            continue
        package(made.write(), "bundle", tmp_path / str(moved))
        assert verify.verify(tmp_path / str(moved))[1].passed


@pytest.mark.usefixtures("with_script")
@pytest.mark.parametrize("least", [20.0, 60.0])
def test_steps_of_a_quantized_file_may_move_answers_to_the_recorded_sqnr(
    made: ExampleRun, tmp_path: Path, least: float
) -> None:
    """The script and verification judge alike, beyond the 1 % of the range that rounding in float32 may explain."""
    wanted, vector = {"y": np.float32([[0, 1, 2, 3.1]])}, tmp_path / "run/test_vector.npz"  # 31 dB, 3 % of the range
    feeds = {"x": np.ones((1, 4), np.float32)}
    save_vector(vector, Vector(feeds, wanted, {"y": 1.0}, {}, {"y": 0.2}, {"y": least}))
    made.vector = made.vector.model_copy(update={"sha256": file_digest(vector)})
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
    if least > 31:
        with pytest.raises(ModelError, match="y does not match the test vector"):
            package(made.write(), "bundle", tmp_path / "bundle")
        return
    package(made.write(), "bundle", tmp_path / "bundle")
    assert verify.verify(tmp_path / "bundle")[1].passed


@pytest.mark.usefixtures("with_script")
def test_the_script_takes_a_number_that_rounding_decides_and_no_other(made: ExampleRun, tmp_path: Path) -> None:
    vector, inputs = tmp_path / "run/test_vector.npz", {"x": np.ones((1, 4), np.float32)}
    for bits, seen in ((FINE, 3.0), (COARSE, 3.0), (FINE, 5.0)):  # its answer is 3
        wanted = np.float32([[0, 1, 2, 7]])
        unstable = {"y": make_records(wanted, [Draw(bits, np.array([3]), np.float32([seen]))])}
        save_vector(vector, Vector(inputs, {"y": wanted}, {"y": 1.0}, unstable))
        made.vector = made.vector.model_copy(update={"sha256": file_digest(vector)})
        made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
        if bits < FINE or seen != 3.0:  # of lower precisions alone; or another number
            with pytest.raises(ModelError, match="y does not match the test vector"):
                package(made.write(), "bundle", tmp_path / f"other-{bits}")
        else:
            package(made.write(), "bundle", tmp_path / "bundle")
            assert verify.verify(tmp_path / "bundle")[1].passed


@pytest.mark.parametrize("file", ["graphs/simplify/model.onnx", "test_vector.npz"])
@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other")])
def test_files_that_the_run_did_not_make_are_refused(
    file: str, harm: Callable[[Path], object], made: ExampleRun, tmp_path: Path
) -> None:
    harm(made.write() / file)
    with pytest.raises(ModelError, match=r"missing|not what the run made"):
        package(made.folder, "bundle", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_full_disk_leaves_nothing(made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(chosen: object, folder: Path, keep_samples: bool) -> None:
        (folder / "model.onnx").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundle, "write_bundle", full)
    with pytest.raises(StoreError, match="no space left"):
        package(made.write(), "bundle", tmp_path / "out/b")
    assert not list((tmp_path / "out").iterdir())


def test_a_variant_with_cuda_graphs_has_its_options_wherever_it_is_run_again(made: ExampleRun, tmp_path: Path) -> None:
    """The engine is the same with and without them: the record has the option; packages say if they cannot keep it."""
    graphs = {"cuda_graphs": True}
    engines = map(made.engine, ("tensorrt", "tensorrt_rtx"))
    made.variants = [record.model_copy(update=graphs) for record in (*made.variants, *engines)]
    assert all(remeasure._engine(record).cuda_graphs for record in made.variants)  # type: ignore[attr-defined]
    run, said = made.write(), {}
    packages = [(form, name) for form in ("triton", "bundle") for name in ("onnxruntime-fp32", "tensorrt-fp16")]
    for form, name in packages:
        wrote = package(run, form, tmp_path / f"{form}-{name}", name)  # type: ignore[arg-type]
        said[form, name[:4]] = any("does not replay" in text for text in wrote.cautions)
    bundles = {("bundle", "onnx"): False, ("bundle", "tens"): True}
    assert said == {("triton", "onnx"): True, ("triton", "tens"): False, **bundles}
    assert "graphs: true" in (tmp_path / "triton-tensorrt-fp16/net_py_build/config.pbtxt").read_text()
