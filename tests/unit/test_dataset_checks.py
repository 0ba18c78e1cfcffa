"""Data before they are used: what makes them unfit, and what is said of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from enginesmith.calibration.dataset import Dataset, open_dataset, validate_for_calibration
from enginesmith.calibration.file_formats import check_arrays, check_variety, check_zeros
from enginesmith.calibration.lazy_arrays import LazyRows
from enginesmith.calibration.options import DataOptions
from enginesmith.pipeline.errors import DataError, UsageError
from enginesmith.pipeline.tensors import TensorSpec
from enginesmith.pipeline.workflows.inspect import inspect

IDS = np.arange(12).reshape(3, 4)
IMAGE = np.linspace(0, 1, 18, dtype=np.float32).reshape(3, 2, 3)


def opened(tmp_path, **arrays):
    np.savez(tmp_path / "samples.npz", **arrays)
    specs = [
        TensorSpec(name=name, dtype=str(array.dtype), shape=("batch", *array.shape[1:]))
        for name, array in arrays.items()
    ]
    return open_dataset(str(tmp_path / "samples.npz"), specs)


def test_labels_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    """Calibration needs none, and so nothing else tells it where such a sample is in its part."""
    labels = np.zeros((5, 2), np.float32)
    labels[[1, 1, 3], [0, 1, 0]] = np.nan, np.nan, np.inf
    np.savez(tmp_path / "samples.npz", x=np.arange(5, dtype=np.float32), labels=labels, other=labels[:, 1])
    x = [TensorSpec(name="x", dtype="float32", shape=("batch",))]
    data = open_dataset(str(tmp_path / "samples.npz"), x, options=DataOptions(labels="labels,other"))
    assert [note.partition(": ")[0] for note in data.notes] == [
        "'labels' has NaN or infinity in 2 of 5 rows of samples.npz, first in row 1",
        "'other' has NaN or infinity in 1 of 5 rows of samples.npz, first in row 1",
    ]
    np.savez(tmp_path / "samples.npz", x=np.arange(5, dtype=np.float32), labels=np.zeros(5, np.float32))
    assert not open_dataset(str(tmp_path / "samples.npz"), x).notes


class Counted(LazyRows):
    """Rows that count how many of them were made."""

    def __init__(self, value):
        super().__init__((1000, 1 << 16), np.float32)
        self.value = value
        self.made = 0

    def __getitem__(self, key):
        made = np.full((len(range(*key.indices(len(self)))), *self.shape[1:]), self.value, self.dtype)
        self.made += len(made)
        return made + np.arange(len(made), dtype=self.dtype)[:, None]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["ids:int64:batch,24"], "--input ids:int64:batch,length for any size, or --input ids:int64:batch,60 and"),
        (
            ["ids:int64:batch,24", "mask:int64:batch,24"],
            "--input ids:int64:batch,length --input mask:int64:batch,length for any size, "
            "or --input ids:int64:batch,60 --input mask:int64:batch,60 and",
        ),
        (["ids:int64:batch,24,2"], ""),
        (["ids:int64:batch,24", "mask:int64:batch,7"], ""),
    ],
)
def test_rows_of_another_length_may_be_what_a_module_takes(inputs: list[str], said: str) -> None:
    specs = [TensorSpec.parse(text) for text in inputs]
    with pytest.raises(DataError) as caught:
        check_arrays("data.npz", {spec.name: np.ones((9, 60), np.int64) for spec in specs}, specs)
    told = "; or, if the model is a PyTorch module that takes such rows: "
    fitting = f"give rows that fit {specs[0]}, one sample along the first axis"
    assert caught.value.remedy == fitting + (f"{told}{said} an example input of that size" if said else "")


@pytest.mark.parametrize(("shape", "suggested"), [((9, 16), True), ((9, 15), False), ((9, 2, 16), False)])
def test_rows_may_be_whole_inputs_of_a_module_without_a_batch(shape: tuple[int, ...], suggested: bool) -> None:
    with pytest.raises(DataError) as caught:
        check_arrays("data.npz", {"x": np.ones(shape, np.float32)}, [TensorSpec.parse("x:float32:16")])
    assert ("calls torch.vmap(module)(x)" in str(caught.value.remedy)) == suggested


class TestZeros:
    @pytest.mark.parametrize(
        "arrays",
        [
            {"image": np.zeros((3, 2), np.float32)},
            {"ids": np.zeros((3, 2), np.int64)},
            {"image": np.zeros((3, 2), np.float32), "mask": np.zeros((3, 2), bool)},
        ],
    )
    def test_nothing_but_zeros(self, tmp_path, arrays):
        with pytest.raises(DataError, match="nothing but zeros in " + ", ".join(map(repr, arrays))) as caught:
            opened(tmp_path, **arrays)
        assert caught.value.remedy

    def test_an_input_of_zeros_beside_others_is_noted(self, tmp_path):
        data = opened(tmp_path, image=IMAGE, state=np.zeros((3, 5), np.float32))
        assert data.notes == ("'state' is zero in all rows of samples.npz",)

    def test_integers_may_be_zero(self, tmp_path):
        assert opened(tmp_path, ids=IDS, token_type_ids=np.zeros((3, 4), np.int64)).notes == ()

    def test_a_few_rows_are_enough_to_see_that_there_is_something(self):
        rows = Counted(1)
        assert check_zeros("x", {"x": rows}) == check_variety("x", {"x": rows}) == ()
        assert rows.made < 10


class TestForCalibration:
    def test_samples_that_differ(self, tmp_path):
        data = opened(tmp_path, image=IMAGE, ids=IDS)
        held = validate_for_calibration(data)
        assert held.notes == ()
        assert (held.whole, held.rows) == (data, data.rows)

    @pytest.mark.parametrize(
        "arrays",
        [
            {"image": IMAGE[[1, 1, 1]]},
            {"ids": IDS[[1, 1, 1]]},
            {"image": IMAGE[[1, 1, 1]], "mask": np.ones((3, 2), np.int64)},
        ],
    )
    def test_one_sample_many_times(self, tmp_path, arrays):
        data = opened(tmp_path, **arrays)  # an evaluation may do with that
        names = ", ".join(map(repr, arrays))
        with pytest.raises(DataError, match=f"calibration samples of {names} are all the same") as caught:
            validate_for_calibration(data)
        assert "samples.npz" in caught.value.message
        assert caught.value.remedy

    def test_one_input_that_never_varies_is_noted(self, tmp_path):
        size = np.full((3, 2), 640, np.float32)
        data = validate_for_calibration(opened(tmp_path, image=IMAGE, size=size, mask=np.ones((3, 2), np.int64)))
        assert data.notes == ("calibration samples of 'size' are all the same in samples.npz",)

    def test_a_difference_in_the_last_row_counts(self):
        rows = np.ones((2000, 1000), np.float32)
        rows[-1, -1] = 2
        assert validate_for_calibration(Dataset("x", {"x": rows})).notes == ()

    def test_one_row_is_noted(self):
        data = validate_for_calibration(Dataset("x", {"x": IMAGE[:1]}))
        assert data.notes == ("x has one row: ranges from one sample are not reliable",)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays(tmp_path, save):
    save(tmp_path / "a.npz", x=np.zeros((3, 2), np.float16), labels=np.array([4, 4, 1]))
    found = inspect(tmp_path / "a.npz")
    assert (found["samples"], found["arrays"]) == (3, ["x: float16[3, 2]", "labels: int64[3]"])
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
    assert (found["samples"], found["arrays"]) == (357, ["image: float32[357, 1, 8, 8]", "labels: int64[357]"])


def test_a_folder_of_images(tmp_path):
    for label in range(12):
        (tmp_path / f"class {label:02}").mkdir()
        Image.new("L", (label + 1, 4)).save(tmp_path / f"class {label:02}" / "a.png")
    found = inspect(tmp_path)
    assert (found["samples"], found["sizes"][0], found["labels"][0]) == (12, "4×1: 1", "0 class 00: 1")
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


def test_a_table_beside_samples_is_told_apart() -> None:
    inputs = [TensorSpec.parse(each) for each in ("x:float32:2,6", "table:float32:7,4")]
    arrays = {"x": np.ones((30, 6), np.float32), "table": np.ones((7, 4), np.float32)}
    with pytest.raises(DataError, match="x 30, table 7") as error:
        check_arrays("odd.npz", arrays, inputs)
    assert error.value.remedy.endswith("samples: --input x:float32:batch,6 --input table:float32:7,4")
    with pytest.raises(DataError) as error:
        check_arrays("odd.npz", {**arrays, "table": np.ones((8, 4), np.float32)}, inputs)
    assert error.value.remedy == "give each the same rows"


def test_rows_whose_sizes_do_not_add_up_are_refused() -> None:
    inputs = [
        TensorSpec.parse(text)
        for text in ("mask:int64:batch,past+length", "ids:int64:batch,length", "past:float32:batch,past")
    ]
    rows = {"mask": np.ones((3, 8), np.int64), "ids": IDS[:, :3], "past": np.ones((3, 5), np.float32)}
    assert list(check_arrays("data", rows, inputs)) == ["mask", "ids", "past"]
    with pytest.raises(
        DataError, match=r"'mask' has the shape \[3, 7\], expected \[samples, 8\]: past\+length = 5\+3 = 8"
    ):
        check_arrays("data", rows | {"mask": rows["mask"][:, :7]}, inputs)


@pytest.mark.parametrize("model", ["hf:./my-bert", "timm:resnet18"])
def test_a_model_that_is_no_file_is_refused_with_the_command_that_makes_one(model: str) -> None:
    with pytest.raises(UsageError, match="is a model that has to be loaded") as error:
        inspect(Path(model))
    assert error.value.remedy.endswith(f"enginesmith export {model} -o model.onnx")
