"""Pruning through the command line, on small nets: what is written, searched for, shown, and refused at once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.planning import compression
from enginesmith.pipeline.tasks.prune import FACTS, TRIALS

Cli = Any

NETS = Path(__file__).parents[1] / "data" / "nets.py"


def test_what_is_written_is_a_model(cli: Cli, tmp_path: Path) -> None:
    done = cli("prune", f"{NETS}:mlp", "-o", tmp_path / "small", "--prune", "0.5", "--json")
    assert done.code == 0, done.text
    found = json.loads(done.stdout)
    assert (found["pruning"]["channels_before"], found["pruning"]["channels_after"]) == (16, 8)
    assert {Path(name).name for name in found["files"]} >= {"model.json", "state.safetensors", "pruning.json"}
    again = cli("prune", tmp_path / "small", "-o", tmp_path / "smaller", "--prune", "macs=-50%", "--json")
    assert again.code == 0, again.text
    assert json.loads(again.stdout)["pruning"]["channels_after"] == 4


def test_what_is_written_after_recovery_tells_of_all_turns(cli: Cli, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    recover = ("--recover", "distil", "--recover-time", "2s", "--data", tmp_path / "x.npy")
    how = ("--prune", "0.5", "--multiple-of", "2", "--prune-steps", "2", *recover)
    done = cli("prune", f"{NETS}:mlp", "-o", tmp_path / "small", *how, "--json")
    assert done.code == 0, done.text
    written = json.loads((tmp_path / "small" / FACTS).read_text())
    assert (tmp_path / "small" / "recovery.json").is_file()
    assert written == json.loads(done.stdout)["pruning"]
    assert written["target"] == "50%"
    assert (written["channels_before"], written["channels_after"]) == (16, 8)
    first, second = json.loads((tmp_path / "small" / "model.json").read_text())["surgery"]["history"]
    (group,) = written["groups"]
    assert (group["before"], group["after"]) == (16, 8)
    assert group["kept"] == [first["kept"][index] for index in second["kept"]]


def test_a_missed_target_is_noted_beside_the_training(cli: Cli, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    how = ("--prune", "0.4", "--multiple-of", "8", "--recover", "distil", "--recover-time", "2s")
    done = cli("prune", f"{NETS}:mlp", "-o", tmp_path / "small", *how, "--data", tmp_path / "x.npy")
    assert done.code == 0, done.text
    assert "note: 50.0% of the channels are left, not 60.0%" in done.text


@pytest.mark.thorough
def test_a_latency_is_searched_for_and_no_trial_done_twice(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_TRIALS", 2)  # of which one leaves half of the MACs, if the other is too slow
    prune = ("prune", f"{NETS}:wide", "--prune", "latency=-10%", "--engine", "onnxruntime", "--measure-time", "0.3s")
    done = cli(*prune, "-o", tmp_path / "small", "--json")
    assert done.code == 0, done.text
    found = json.loads(done.stdout)
    trials = json.loads((tmp_path / "small" / TRIALS).read_text())
    assert 1 <= len(trials) <= 2
    best = max((one for one in trials if one["latency_left"] <= 0.9 * 1.02), key=lambda one: one["macs_left"])
    left = found["pruning"]["macs_after"] / found["pruning"]["macs_before"]
    assert left == pytest.approx(best["macs_left"], abs=0.02)
    assert f"{best['latency_left']:.1%} of the dense latency, in {len(trials)} trials" in found["summary"]
    again = cli(*prune, "-o", tmp_path / "again")
    assert again.code == 0, again.text
    assert json.loads((tmp_path / "again" / TRIALS).read_text()) == trials


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("optimize given.onnx --prune 0.3", "channels are pruned in a module"),
        ("prune given.onnx -o small --prune 0.3", "channels are pruned in a module"),
        ("prune digits -o small --prune 0.3 --recover los.py:loss", "there is no file los.py"),
        ("prune digits -o small --prune 0.3 --recover loss.py:los", "did you mean loss.py:loss?"),
        ("prune digits -o small --prune 0.3 --recover distil --recover-time 0", "--recover-time: "),
        ("optimize digits --prune 0.3 --metric loss:metric", "loss has no function 'metric'"),
        ("prune digits -o small --prune latency=-40% --engine compiled", "give --engine onnxruntime"),
        ("sparsify given.onnx -o given.onnx", "given.onnx is the model itself, and would be overwritten"),
        ("simplify given.onnx -o ./given.onnx", "is the model itself"),
        ("precision given.onnx -o given.onnx --precision fp16", "is the model itself"),
        ("sparsify given.onnx -o other.onnx", "other.onnx.data has the weights of given.onnx"),
    ],
)
def test_refused_at_once(command: str, words: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _onnx_with_weights_beside_it(Path("given.onnx"), "other.onnx.data")
    Path("loss.py").write_text("def loss(student, teacher, batch): ...\n", encoding="utf-8")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    done = cli(*command.split())
    assert done.code == 2, done.text
    assert words in done.text
    assert "started" not in done.text
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def _onnx_with_weights_beside_it(path: Path, data: str) -> None:
    import numpy as np
    import onnx
    from onnx import numpy_helper, parser

    text = '<ir_version: 9, opset_import: ["": 20]> g (float[batch, 8] x) => (float[batch, 8] y) { y = MatMul(x, w) }'
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=0)
