"""What `inspect` tells about data."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from enginesmith.pipeline.errors import DataError, UsageError
from enginesmith.pipeline.workflows.inspect import inspect


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays(tmp_path, save):
    save(tmp_path / "a.npz", x=np.zeros((3, 2), np.float16), labels=np.array([4, 4, 1]))
    found = inspect(tmp_path / "a.npz")
    assert found["samples"] == 3
    assert found["arrays"] == ["x: float16[3, 2]", "labels: int64[3]"]
    assert found["labels"] == ["1: 1", "4: 2"]


def test_headers_are_enough(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((3, 2)))
    monkeypatch.setattr(np.lib.format, "read_array", None)
    assert inspect(tmp_path / "a.npz")["labels"].startswith("none")


def test_one_array(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    assert inspect(tmp_path / "a.npy")["arrays"] == ["array: float64[3, 2]"]


def test_damaged(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"not what it says")
    with pytest.raises(DataError, match="cannot read"):
        inspect(tmp_path / "a.npz")


def test_embedded():
    found = inspect(Path("digits/test"))
    assert found["samples"] == 357
    assert found["arrays"] == ["image: float32[357, 1, 8, 8]", "labels: int64[357]"]


def test_a_folder_of_images(tmp_path):
    for label in range(12):
        (tmp_path / f"class {label:02}").mkdir()
        Image.new("L", (label + 1, 4)).save(tmp_path / f"class {label:02}" / "a.png")
    found = inspect(tmp_path)
    assert found["samples"] == 12
    assert found["sizes"][0] == "4×1: 1"
    assert found["labels"][0] == "0 class 00: 1"
    assert found["labels"][-1] == "… and 2 more"
    assert found["preprocessing"].startswith("none")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert inspect(tmp_path)["preprocessing"] == str(tmp_path / "preprocessor_config.json")


def test_texts(tmp_path):
    lines = [{"text": "abc", "label": "good"}, {"sentence1": "abcd", "sentence2": "ef", "label": "bad"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = inspect(tmp_path / "a.jsonl")
    assert (found["samples"], found["pairs"], found["longest"]) == (2, 1, "6 characters")
    assert found["labels"] == ["bad: 1", "good: 1"]
    assert found["tokenizer"].startswith("none: there is no tokenizer beside")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert inspect(tmp_path / "a.jsonl")["tokenizer"] == str(tmp_path / "tokenizer.json")


def test_a_function(tmp_path):
    code = "import numpy as np\ndef feeds():\n    yield {'x': np.zeros((4, 2), np.float32), 'labels': np.arange(4)}\n"
    (tmp_path / "f.py").write_text(f"{code}    1 / 0\n")
    found = inspect(tmp_path / "f.py:feeds")
    assert found["first"] == ["x: float32[4, 2]", "labels: int64[4]"]


def test_neither_a_run_nor_images(tmp_path):
    with pytest.raises(UsageError, match="holds no images"):
        inspect(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        inspect(tmp_path / "nothing.npz2")
