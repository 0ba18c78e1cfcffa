"""--prepend and --append from the command line: raw data in, selected boxes out, all compared with PyTorch."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import enginesmith
from enginesmith.calibration.dataset import embedded

Cli = Callable[..., Any]
DETECTOR = '''
import torch
from torch import nn


class Detector(nn.Module):
    """[batch, 4 + 3, cells]: center and extent in pixels, and probabilities."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 7, 3, 2, 1))
        axis = torch.arange(8) * 4.0 + 2
        self.register_buffer("centers", torch.stack(torch.meshgrid(axis, axis, indexing="xy")).flatten(1))

    def forward(self, image):
        found = 4 * self.body(image).flatten(2)
        return torch.cat([found[:, :2] + self.centers, found[:, 2:4].exp() + 4, found[:, 4:].sigmoid()], 1)


def build():
    return Detector(), {"image": torch.rand(2, 3, 32, 32)}
'''


@pytest.fixture
def raw_digits(tmp_path: Path) -> Path:
    """The digits as a camera would give them: bytes, channels last."""
    data = embedded("digits", "test")
    image = (data.batch(0, 96)["image"] * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)
    assert data.labels is not None
    np.savez(tmp_path / "raw.npz", image=image, labels=np.asarray(data.labels)[:96])
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_digits_take_raw_bytes_and_answer_with_probabilities(raw_digits: Path, cli: Cli, precision: str) -> None:
    run, raw = raw_digits / "run", raw_digits / "raw.npz"
    done = cli(
        *("optimize", "digits", "--prepend", "uint8,nhwc,scale", "--prepend", "normalize=0/1", "--append", "softmax"),
        *("--data", raw, "--metric", "top1", "--precision", precision, "--engine", "onnxruntime"),
        *("--measure-time", "200ms", "--batch", "1,4", "--no-memory", "--out", run, "--quiet"),
    )
    assert done.code == 0, done.text
    document = json.loads((run / "run.json").read_text())
    signature = document["model"]["signature"]
    assert signature["inputs"][0] == {"name": "image", "dtype": "uint8", "shape": ["batch", 8, 8, 1]}
    assert {variant["status"] for variant in document["variants"]} == {"measured"}
    accuracies = [variant["quality"]["value"] for variant in document["variants"]]
    assert min(accuracies) > 0.9
    made = next(variant for variant in document["variants"] if variant["engine"] == "onnxruntime")
    assert made["coverage"]["macs"][precision] > 0.9
    bundle = raw_digits / "bundle"
    assert cli("package", run, "-f", "bundle", "--variant", made["id"], "-o", bundle).code == 0
    assert cli("verify", bundle).code == 0
    image = np.load(raw)["image"][:4]
    answers = (
        runpy.run_path(str(bundle / "infer.py"))["Model"](bundle)({"image": image})["logits"],
        enginesmith.load(bundle)(image),
    )
    for answer in answers:
        np.testing.assert_allclose(answer.sum(1), 1, rtol=1e-4)
        assert np.array_equal(answer.argmax(1), np.load(raw)["labels"][:4])


@pytest.mark.thorough
def test_a_detector_suppresses_its_boxes_itself(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("detector.py").write_text(DETECTOR, encoding="utf-8")
    image = np.random.default_rng(0).integers(0, 256, (24, 48, 40, 3)).astype(np.uint8)
    np.savez("pages.npz", image=image)
    done = cli(
        *("optimize", "detector.py:build", "--prepend", "uint8,nhwc,resize,scale", "--append", "nms=score:0.4,max:20"),
        *("--input", "image:uint8:batch,48,40,3", "--data", "pages.npz", "--engine", "onnxruntime"),
        *("--precision", "fp32", "--batch", "2", "--measure-time", "200ms", "--no-memory", "--out", "run", "--quiet"),
    )
    assert done.code == 0, done.text
    document = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    (output,) = document["model"]["signature"]["outputs"]
    assert output == {"name": "detections", "dtype": "float32", "shape": ["batch", 20, 6]}
    assert document["model"]["signature"]["unordered"] == {"detections": "rows"}
    fp32 = next(variant for variant in document["variants"] if variant["id"] == "onnxruntime-fp32")
    assert fp32["status"] == "measured"
    assert min(entry["sqnr_db"] for entry in fp32["fidelity"]) > 60
    assert cli("package", "run", "-f", "bundle", "--variant", fp32["id"], "-o", "bundle").code == 0
    table = enginesmith.load(Path("bundle"))(image[:2])
    assert table.shape == (2, 20, 6)
    assert (table[:, 0, 4] > 0.4).all()


@pytest.mark.thorough
def test_onnx_files_are_extended_too(tmp_path: Path, cli: Cli) -> None:
    core, file = tmp_path / "core.onnx", tmp_path / "whole.onnx"
    assert cli("export", "digits", "-o", core).code == 0
    words = ("--prepend", "resize=8,uint8", "--append", "topk=3")
    done = cli("export", "digits", *words, "--shape", "height=8:9:16", "--shape", "width=8:9:16", "-o", file)
    assert done.code == 0, done.text
    whole = onnx.load(file)
    assert [value.name for value in whole.graph.output] == ["logits", "logits_indices"]
    assert {"Resize", "TopK", "Conv"} <= {node.op_type for node in whole.graph.node}
    shapes = ("--shape", "height=8:9:16", "--shape", "width=8:9:16")
    assert cli("verify", file, "--against", core, *words, *shapes).code == 0
    assert cli("verify", file, "--against", "digits", *words, *shapes).code == 0
    other = cli("verify", file, "--against", core, "--prepend", "resize=8,uint8,scale", "--append", "topk=3", *shapes)
    assert other.code == 1


@pytest.mark.thorough
def test_engines_that_take_the_module_have_it_too(raw_digits: Path, cli: Cli) -> None:
    run = raw_digits / "run"
    done = cli(
        *(
            "optimize",
            "digits",
            "--prepend",
            "uint8,nhwc,scale",
            "--append",
            "topk=3",
            "--data",
            raw_digits / "raw.npz",
        ),
        *("--engine", "aotinductor", "--engine", "eager", "--precision", "bf16"),
        *("--measure-time", "200ms", "--batch", "2", "--no-memory", "--out", run, "--quiet"),
    )
    assert done.code == 0, done.text
    document = json.loads((run / "run.json").read_text())
    assert {variant["status"] for variant in document["variants"]} == {"measured"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prepend", "blur"), "does not know 'blur'"),
        (("--prepend", "scale", "--prepend", "scale=2"), "scale is given twice"),
        (("--prepend", "normalize=imagenet"), "the input has 1 channels"),
        (("--prepend", "resize=9"), "does not fit the model's input"),
        (("--append", "nms"), "nms needs outputs boxes"),
        (("--append", "topk=11"), "has 10 classes"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(tmp_path: Path, cli: Cli, words: tuple[str, ...], message: str) -> None:
    done = cli("export", "digits", *words, "-o", tmp_path / "m.onnx")
    assert done.code == 2
    assert message in " ".join(done.text.split())


def test_training_behind_appended_outputs_is_refused(tmp_path: Path, cli: Cli) -> None:
    done = cli(
        "optimize", "digits", "--append", "argmax", "--prune", "30%", "--recover", "distil", "--out", tmp_path / "r"
    )
    assert done.code == 2
    assert "--recover" in done.text
