"""Bundles where they arrive: verified by digests and their test vector, loaded into a program, run by their script."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import packaged_runs
from enginesmith import cli, load
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability, ModelError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.rounding import FINE, Draw, make_records
from enginesmith.pipeline.measure.rows import RaceRow
from enginesmith.pipeline.results import remeasure
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.package import manifest, verify
from enginesmith.pipeline.results.package.package import package
from enginesmith.pipeline.workflows import load as loading
from enginesmith.pipeline.workflows.inspect import inspect
from packaged_runs import ExampleRun

found, made = packaged_runs.found, packaged_runs.made  # fixtures
no_script, with_script = packaged_runs.no_script, packaged_runs.with_script


def test_digests_are_checked_without_an_engine(
    made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.variants.append(made.engine("tensorrt_rtx"))
    package(made.write(), "bundle", tmp_path / "b", "tensorrt_rtx-fp16")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MissingCapability, match="4 files are what was packaged; the test vector was not run"):
        verify.verify(tmp_path / "b")
    (tmp_path / "b/model.engine").write_bytes(b"angine")
    with pytest.raises(ModelError, match="nothing was loaded"):
        verify.verify(tmp_path / "b")


def _spoil(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _rewrite(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        values = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(values | changes))

    return change


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_spoil("model.onnx", b"other"), "its sha256 differs"),
        (_spoil("infer.py", b"print()"), "its sha256 differs"),
        (_spoil("extra.so", b"code"), "was not packaged"),
        (lambda folder: (folder / "test_vector.npz").unlink(), "is missing"),
        (_spoil("manifest.json", b'{"schema": "enginesmith.bundle/1", '), "damaged"),
        (_spoil("manifest.json", b"\xff\xfe"), "damaged"),
        (_rewrite(signature=3), "signature"),
        (_rewrite(schema="enginesmith.bundle/2"), "newer schema"),
        (_rewrite(schema="enginesmith.run/1"), "not of the schema"),
        (_rewrite(files={"../run/run.json": {"sha256": "0", "bytes": 1}}), "outside of the bundle"),
        (shutil.rmtree, "no bundle"),
    ],
)
def test_a_bundle_that_is_not_what_was_packaged_is_not_loaded(
    harm: Callable[[Path], object], said: str, found: manifest.Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify.worker, "run", None)  # nothing gets as far as a process
    harm(tmp_path / "b")
    with pytest.raises(EnginesmithError, match=said):
        verify.verify(tmp_path / "b")


def test_outputs_of_a_bundle_that_rounding_decides_are_not_said_to_be_verified(
    found: manifest.Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = samples.read_vector(tmp_path / "b/test_vector.npz")
    (name,) = vector.outputs
    right = vector.outputs[name]
    draw = Draw(FINE, np.arange(right.size // 2), right.reshape(-1)[: right.size // 2] + 1)
    loose = vector._replace(unstable={name: make_records(right, [draw])})
    monkeypatch.setattr(verify.worker, "run", lambda *given, **options: vector.outputs)
    for each, beside in ((vector, ""), (loose, f", but for what is not verified: '{name}' (rounding decides 50 % of")):
        monkeypatch.setattr(samples, "read_vector", lambda file, each=each: each)
        summary, result = verify.verify(tmp_path / "b")
        assert f"answers its test vector{beside}" in summary
        assert result.unverified == ({name: 0.5} if beside else {})


def test_machine_code_is_loaded_only_where_its_maker_is_trusted(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    text = (tmp_path / "b/manifest.json").read_text()
    native = re.sub(r'"engine": \{\s+"name": "\w+"', '"engine": {"name": "aotinductor"', text)
    (tmp_path / "b/manifest.json").write_text(native.replace('"options": {', '"options": {"dtype": "float32",', 1))
    for refused in (lambda: verify.verify(tmp_path / "b"), lambda: load(tmp_path / "b")):
        with pytest.raises(MissingCapability, match="machine code") as caught:
            refused()
        assert "--trust" in caught.value.remedy
    with pytest.raises(ModelError, match=r"engine\.json"):
        load(tmp_path / "b", trust=True)


def test_machine_code_of_a_run_is_loaded_only_where_its_maker_is_trusted(
    made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tf32": True, "host_code": True, "plugins": ["own.so"]}
    plain = made.engine("tensorrt")
    built = plain.history[0].model_copy(update={"parameters": {"fields": {"engine": {"options": options}}}})
    made.variants.append(plain.model_copy(update={"history": (built,)}))
    opened: list[Candidate] = []
    monkeypatch.setattr(loading, "LoadedModel", lambda stored: opened.append(stored.candidate))
    with pytest.raises(MissingCapability, match="machine code") as caught:
        load(made.write(), "tensorrt-fp16")
    assert "trust=True" in caught.value.remedy
    assert "gate --trust" in caught.value.remedy
    load(made.folder, "tensorrt-fp16", trust=True)
    assert opened[0].engine == TensorRT(options=BuildOptions(tf32=True, host_code=True))  # plug-ins are named by people
    assert package(made.folder, "bundle", tmp_path / "b", "tensorrt-fp16").check.endswith("--trust runs it")
    with pytest.raises(MissingCapability, match="made up, and the engine has machine code"):
        package(made.folder, "bundle", tmp_path / "c", "tensorrt-fp16", keep_samples=False)


def test_a_copy_of_a_trusted_model_is_opened_as_that_was(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    with load(tmp_path / "b", trust=True) as model:
        again, _ = model.__reduce__()
        assert again.keywords["trust"]


def test_engines_with_host_code_are_loaded_only_where_their_maker_is_trusted() -> None:
    options = {"tf32": False, "host_code": True}
    assert (TensorRT.needs_trust(options), TensorRT.needs_trust({})) == (True, False)
    engine = TensorRT.from_package(Path(), options)
    assert (engine.options.host_code, engine.options.tf32) == (True, False)


@pytest.mark.parametrize(("words", "code"), [(("--min-sqnr", "40"), 0), (("--min-sqnr", "300"), 1)])
def test_a_bundle_is_verified_by_the_sqnr_that_is_asked_for(
    made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int
) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    vector = samples.read_vector(tmp_path / "b" / manifest.VECTOR)
    near = {name: value * np.float32(1.0001) for name, value in vector.outputs.items()}
    monkeypatch.setattr(verify, "answer", lambda *_: near)
    done = CliRunner().invoke(cli.main, ["verify", str(tmp_path / "b"), *words, "--quiet"])
    assert done.exit_code == code, done.output


def test_inspect_tells_what_a_bundle_is_and_how_it_is_checked(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    found = inspect(tmp_path / "b")
    assert (found["kind"], found["variant"]) == ("bundle", manifest.read(tmp_path / "b").variant)
    assert found["check"] == f"enginesmith verify {tmp_path / 'b'}"


def test_inspect_says_what_to_look_at_instead(made: ExampleRun, tmp_path: Path) -> None:
    package(run := made.write(), "triton", tmp_path / "t")
    for folder in (tmp_path / "t", tmp_path / "t/net_py_build"):
        found = inspect(folder)
        assert (found["kind"], found["variant"]) == ("triton", "onnxruntime-fp32")
        assert "check" not in found, "verify loads bundles"
    shutil.copytree(tmp_path / "t/net_py_build", tmp_path / "t/another")
    with pytest.raises(UsageError, match="has 2 models for Triton") as error:
        inspect(tmp_path / "t")
    assert error.value.remedy == f"inspect one of them: {tmp_path / 't/another'}"
    (folder := run / "variants/onnxruntime-fp32").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UsageError, match="is a part of a run directory") as error:
        inspect(folder)
    assert str(run) in error.value.remedy


def test_what_python_writes_beside_an_imported_script_is_named(
    found: manifest.Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify.worker, "run", None)
    (tmp_path / "b/__pycache__").mkdir()
    _spoil("__pycache__/infer.cpython-311.pyc", b"code")(tmp_path / "b")
    with pytest.raises(ModelError, match="was not packaged") as error:
        verify.verify(tmp_path / "b")
    assert "remove the folder __pycache__" in error.value.remedy
    _spoil("extra.so", b"code")(tmp_path / "b")
    with pytest.raises(ModelError, match="was not packaged, and so 1 more") as error:
        verify.verify(tmp_path / "b")
    assert "copy the bundle again" in error.value.remedy


def test_options_of_a_model_are_refused_for_a_bundle(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    words = ["verify", str(tmp_path / "b"), "--device", "cuda", "--batch", "64"]
    refused = CliRunner().invoke(cli.main, words)
    assert refused.exit_code == 2
    for word in ("--batch", "--device", "cannot be given with a bundle", "omit them; or give an ONNX file"):
        assert word in refused.output


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_bundle_is_not_compared_with_a_model_but_its_graph_is(
    made: ExampleRun, tmp_path: Path, has_graph: bool
) -> None:
    package(made.write(), "bundle", bundle := tmp_path / "b")
    if not has_graph:
        (bundle / "model.onnx").rename(bundle / "model.xml")
    refused = CliRunner().invoke(cli.main, ["verify", str(bundle), "--against", "digits"])
    assert refused.exit_code == 2
    assert f"{bundle} is a bundle, which is compared with the answers in it" in refused.output
    remedy = f"omit --against; or give the graph in it: {bundle / 'model.onnx'}\n"
    assert (remedy in refused.output) is has_graph
    refused = CliRunner().invoke(cli.main, ["verify", str(tmp_path), "--against", "digits"])
    assert refused.exit_code == 2
    assert f"{tmp_path} is a folder, and --against compares a file with a model" in refused.output


def test_only_bundles_can_be_verified(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "triton", tmp_path / "t")
    with pytest.raises(UsageError, match="no test vector"):
        verify.verify(tmp_path / "t/net_py_build")


@pytest.mark.usefixtures("with_script")
def test_the_script_of_bundles_stands_alone_and_explains_what_is_missing(made: ExampleRun, tmp_path: Path) -> None:
    made.variants.append(made.engine("tensorrt_rtx"))
    package(made.write(), "bundle", tmp_path / "b", "tensorrt_rtx-fp16")
    script = tmp_path / "b/infer.py"
    assert f'"{manifest.SCHEMA}"' in script.read_text()
    imported = re.findall(r"^\s*(?:import|from) (\w+)", script.read_text(), re.M)
    assert {*imported} - sys.stdlib_module_names == {"numpy", "onnxruntime", "openvino", "torch"}

    def run(*arguments: str) -> tuple[int, str]:
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=hidden)
        return done.returncode, done.stdout + done.stderr

    assert run("--help")[0] == 0
    code, said = run("--input", "x.npy")
    assert (code, said.splitlines()[-1].partition("error: ")[2]) == (
        2,
        "--input x.npy: write NAME=x.npy, with the name of an input (see manifest.json)",
    )
    code, said = run()
    assert code == 4
    assert said.startswith("error: this machine cannot run the engine: "), said
    assert "made with tensorrt_rtx 10.14.1 for cuda" in said


def test_the_script_imports_nothing_that_was_added_to_its_bundle(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    for name in ("numpy", "json", "argparse"):
        (tmp_path / f"b/{name}.py").write_text(f"print('{name} of the bundle')")
    (tmp_path / "link.py").symlink_to(tmp_path / "b/infer.py")
    for words, folder in (["b/infer.py"], tmp_path), (["infer.py"], tmp_path / "b"), (["link.py"], tmp_path):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder, check=True)
        assert done.stdout.endswith("all answers match the test vector\n")
        assert "of the bundle" not in done.stdout


def test_the_script_keeps_its_exit_code_where_nobody_reads_its_answers(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    reading, writing = os.pipe()
    os.close(reading)
    for stream, code, words in (writing, 0, ""), (os.open("/dev/full", os.O_WRONLY), 1, "No space left on device"):
        command = [sys.executable, str(tmp_path / "b/infer.py")]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
        os.close(stream)
        assert done.returncode == code
        assert done.stderr == (words and f"error: the answers cannot be printed: {words}\n")


def test_the_script_runs_in_a_folder_that_is_not_utf8_where_the_library_says_what_is_wrong(
    made: ExampleRun, tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    package(made.write(), "bundle", tmp_path / "b")
    (tmp_path / "b").rename(folder)
    done = subprocess.run([sys.executable, folder / "infer.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(UsageError, match="is not UTF-8"):
        load(folder)


def test_the_script_explains_wrong_usage(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    script, right = runpy.run_path(str(tmp_path / "b/infer.py")), (tmp_path / "b/manifest.json").read_text()
    for values, lacking in (({}, "schema, files, engine"), ([], "schema"), ({"schema": manifest.SCHEMA}, "files")):
        (tmp_path / "b/manifest.json").write_text(json.dumps(values))
        with pytest.raises(RuntimeError, match=rf"manifest.json has no {lacking}.*copy the bundle again"):
            script["Model"](tmp_path / "b")
    (tmp_path / "b/manifest.json").write_text(right)
    model, ones = script["Model"](tmp_path / "b"), np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"given as ndarray; give a dict of arrays by input name: {'x': …}"):
        model(ones)
    np.savez(tmp_path / "x.npz", x=ones)
    np.save(tmp_path / "x.npy", ones)
    (tmp_path / "x.txt").write_text("1 2")
    assert np.array_equal(script["_read_array"](tmp_path / "x.npy"), ones)
    for name in ("x.npz", "x.txt"):
        with pytest.raises(ValueError, match=f"{name} cannot be read: give a .npy file"):
            script["_read_array"](tmp_path / name)


def test_programs_and_bundles_run_with_the_tuned_options(
    made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    chosen = {"intra_op_num_threads": "1", "session.intra_op.allow_spinning": "0"}
    fields = {"session_options": [f"{name}={value}" for name, value in chosen.items()]}
    tuning = {"fields": fields, "kept": (), "trials": (), "untried": ()}
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph, tuning=tuning)]
    folder, seen = made.write(), list[Any]()
    package(folder, "bundle", tmp_path / "b")
    candidates = [
        remeasure.candidate("run", remeasure.Stored(folder, runs.read(folder), made.variants[0])),
        verify.candidate(tmp_path / "b", manifest.read(tmp_path / "b")),
    ]
    for found in candidates:  # for gate, benchmark and load
        with found.engine.load(found.artifact, found.device) as session:
            seen.append(session._session.get_session_options())  # type: ignore[attr-defined]
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda file, given, **more: seen.append(given) or real(file, given, **more)
    )
    assert runpy.run_path(str(tmp_path / "b/infer.py"))["Model"]().check()[1] == []
    assert len(seen) == 3
    for options in seen:
        assert options.intra_op_num_threads == 1
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_the_script_uses_the_cores_that_the_process_may_use(
    made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's own default counts those of the machine."""
    import onnxruntime

    package(made.write(), "bundle", tmp_path / "b")
    real, seen = onnxruntime.InferenceSession, list[int]()
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda file, given, **more: seen.append(given.intra_op_num_threads) or real(file, given, **more),
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6})
    runpy.run_path(str(tmp_path / "b/infer.py"))["Model"](tmp_path / "b")
    assert seen == [3]


def test_the_script_reports_nothing_to_the_makers_of_the_runtime(
    made: ExampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "")  # is restored in the end
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    runpy.run_path(str(tmp_path / "b/infer.py"))["Model"](tmp_path / "b")
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def test_the_script_warns_at_the_first_size_that_was_not_verified(made: ExampleRun, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    model = runpy.run_path(str(tmp_path / "b/infer.py"))["Model"](tmp_path / "b")
    most = manifest.read(tmp_path / "b").shapes["batch"].max
    assert model({"x": np.ones((most, 4), np.float32)})["y"].shape == (most, 4)
    with pytest.warns(UserWarning, match=f"batch is {most + 1}, and the engine was verified for 1 to {most}"):
        model({"x": np.ones((most + 1, 4), np.float32)})
    assert model({"x": np.ones((most + 2, 4), np.float32)})["y"].shape == (most + 2, 4)


def test_runs_and_bundles_are_loaded_into_a_program(made: ExampleRun, tmp_path: Path) -> None:
    good, ones = made.variants[0], np.ones((2, 4), np.float32)
    changes = ({"id": "bad", "status": "failed", "reason": "wrong result"}, {"id": "slow", "rejected": "no faster"})
    skipped = {"id": "none", "artifact": None, "status": "skipped", "reason": "no time was left"}
    out = {**skipped, "id": "out", "race": (RaceRow(variant="out", lap=1, dropped="onnxruntime-fp32 is faster"),)}
    wrong = {**skipped, "id": "wrong", "status": "failed", "reason": "other answers"}
    made.variants += [good.model_copy(update=fields) for fields in (*changes, skipped, out, wrong)]
    folder = made.write()
    package(folder, "bundle", tmp_path / "bundle", None)
    for place in (folder, str(tmp_path / "bundle")):
        with load(place, good.id, device="cpu") as model:
            assert np.array_equal(model(x=ones), ones * np.arange(4, dtype=np.float32))
            assert model.check().passed
    for name, doubt in (("bad", "bad: it failed in the run: wrong result"), ("slow", "it was rejected: no faster")):
        with pytest.warns(UserWarning, match=doubt), load(folder, name) as model:
            assert model.variant == name
    with (
        pytest.warns(UserWarning, match="it was not measured"),
        pytest.raises(UsageError, match="none has no engine: no time was left"),
    ):
        load(folder, "none")
    with (
        pytest.warns(UserWarning, match="it failed"),
        pytest.raises(UsageError, match=r"wrong has no engine: other answers\n(?s:.*)name another variant"),
    ):
        load(folder, "wrong")
    with (
        pytest.warns(UserWarning, match="it was not measured"),
        pytest.raises(
            UsageError, match=r"faster(?s:.*)of its own: --engine onnxruntime --precision fp32, with another"
        ),
    ):
        load(folder, "out")
    refusals: list[tuple[Path, dict[str, str], str]] = [
        (tmp_path / "bundle", {"variant": "other"}, "is a bundle package of onnxruntime-fp32"),
        (folder, {"variant": "eager"}, r"net\.py"),
        (folder, {"variant": good.id, "device": "tpu"}, "no device 'tpu'"),
        (tmp_path, {}, "no run in"),
        (made.write(winner=None, winner_reason="all are slow"), {}, r"all are slow(?s:.*)variant=…\); built are: onnx"),
    ]
    for place, asked, words in refusals:
        with pytest.raises(UsageError, match=words):
            load(place, **asked)
    for file, place in ((folder / good.artifact.path, folder), (tmp_path / "bundle/model.onnx", tmp_path / "bundle")):
        file.write_bytes(file.read_bytes() + b" ")
        with pytest.raises(ModelError, match="is not"):
            load(place, good.id)
