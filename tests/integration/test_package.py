"""From a run to a bundle that answers elsewhere: in this process, in a bare interpreter, moved, tampered with."""

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Cli = Callable[..., Any]

BARE = """
import builtins, runpy, sys
real = builtins.__import__
def allowed(name, scope=None, *rest, **named):
    if scope and str(scope.get("__file__", "")).endswith("infer.py"):
        assert name.partition(".")[0] in {*sys.stdlib_module_names, "numpy", "onnxruntime"}, name
    return real(name, scope, *rest, **named)
builtins.__import__ = allowed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not any(name.startswith("enginesmith") for name in sys.modules)
"""


@pytest.fixture
def bundle(digits_run: Path, cli: Cli, tmp_path: Path) -> Path:
    made = cli(
        "package", digits_run, "-f", "bundle", "-o", tmp_path / "made", "--variant", "onnxruntime-fp32", "--json"
    )
    assert made.code == 0, made.text
    shutil.copytree(json.loads(made.stdout)["folder"], tmp_path / "else where")
    return tmp_path / "else where"


def infer(bundle: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", BARE, str(bundle / "infer.py"), *map(str, arguments)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def test_a_bundle_answers_elsewhere(bundle: Path, cli: Cli, tmp_path: Path) -> None:
    checked = cli("verify", bundle, "--json")
    assert checked.code == 0, checked.text
    assert json.loads(checked.stdout)["fidelity"][0]["passed"]
    for path in (*bundle.iterdir(), bundle):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        alone = infer(bundle)
        assert alone.returncode == 0, alone.stderr
        assert alone.stdout.startswith("logits float32 (1, 10)")
        assert alone.stdout.endswith("all answers match the test vector\n")
        np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), np.float32))
        asked = infer(bundle, "--input", f"image={tmp_path / 'x.npy'}", "--output", tmp_path / "y.npz")
        assert "(3, 10)" in asked.stdout, asked.stderr
        nowhere = infer(bundle, "--output", tmp_path / "no folder" / "y.npz")
        assert (nowhere.returncode, nowhere.stderr.count("\n")) == (1, 1), "one sentence, no traceback"
        assert np.load(tmp_path / "y.npz")["logits"].shape == (3, 10)
        usage = infer(bundle, "--help")
        assert (usage.returncode, "--input NAME=FILE.npy" in usage.stdout) == (0, True), usage.stderr
        assert infer(bundle, "--color").returncode == 2
        for wrong, said in (("picture", "the model takes ['image']"), ("image", "the model takes ['batch', 1, 8, 8]")):
            np.save(tmp_path / "x.npy", np.zeros((3, 1, 9, 8), np.float32))
            refused = infer(bundle, "--input", f"{wrong}={tmp_path / 'x.npy'}")
            assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr
            assert "Traceback" not in refused.stderr
    finally:
        bundle.chmod(0o755)


def test_a_service_shares_a_bundle_among_threads(bundle: Path) -> None:
    infer = runpy.run_path(str(bundle / "infer.py"))
    model = infer["Model"]()
    answers, wrong = model.check()
    assert (list(answers), wrong) == (["logits"], [])
    image = np.load(bundle / "test_vector.npz")["input:image"]
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(model, [{"image": image.tolist()}] * 16):
            np.testing.assert_allclose(answer["logits"], answers["logits"], rtol=1e-5)
    with pytest.raises(ValueError, match="image is <U1; the model takes float32"):
        model({"image": ["x"]})


def test_what_was_changed_is_not_loaded(bundle: Path, cli: Cli) -> None:
    with (bundle / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert "nothing was loaded" in infer(bundle).stderr
    refused = cli("verify", bundle)
    assert refused.code == 1
    assert "its sha256 differs" in refused.stderr


def test_a_manifest_of_another_schema_is_not_followed(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace("enginesmith.bundle/1", "enginesmith.bundle/2"))
    refused = infer(bundle)
    assert refused.returncode == 1
    assert "is of schema enginesmith.bundle/2" in refused.stderr
    (bundle / "manifest.json").write_text(text[:200])
    assert infer(bundle).stderr.startswith("error: manifest.json cannot be read: ")


@pytest.mark.thorough
def test_a_model_that_answers_otherwise_fails(bundle: Path, cli: Cli) -> None:
    from enginesmith.pipeline.results.package import manifest

    vector = dict(np.load(bundle / "test_vector.npz"))
    np.savez(bundle / "test_vector.npz", **{**vector, "output:logits": -vector["output:logits"]})
    values = json.loads((bundle / "manifest.json").read_text())
    values["files"] = {name: one.model_dump() for name, one in manifest.list_files(bundle).items()}
    (bundle / "manifest.json").write_text(json.dumps(values))
    differs = infer(bundle)
    assert differs.returncode == 3
    assert "logits does not match the test vector" in differs.stderr
    failed = cli("verify", bundle)
    assert failed.code == 1
    assert "does not answer its test vector" in failed.stdout


def test_what_a_bundle_is_of_is_kept_in_the_run(digits_run: Path) -> None:
    record = json.loads((digits_run / "run.json").read_text())["variants"][0]
    assert record["id"] == "onnxruntime-fp32"
    assert (digits_run / record["graph"]["path"]).is_file()
    assert record["graph"]["path"] != record["artifact"]["path"]
    stored = np.load(digits_run / record["test_vector"]["path"])
    assert sorted(stored.files) == ["input:image", "output:logits", "range:logits", "rounding:logits"]


def test_a_file_needs_something_to_be_held_against(cli: Cli, digits_run: Path) -> None:
    answer = cli("verify", digits_run / "run.json")
    assert answer.code == 2
    assert "--against MODEL" in answer.stderr
