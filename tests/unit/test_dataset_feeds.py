"""Functions of the user's that yield feeds: samples and batches, endless ones, and those that do not work."""

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from enginesmith.calibration import feeds, user_code
from enginesmith.calibration.dataset import DataOptions, open_dataset
from enginesmith.pipeline.errors import DataError, SourceError
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.tensors import TensorSpec

INPUTS = (TensorSpec.parse("x:float32:batch,2"),)

CODE = """
import numpy as np
from dataclasses import dataclass
import helper_of_my_data

X = np.arange(12, dtype=np.float32).reshape(6, 2)

def samples():
    for row in X:
        yield {"x": row, "labels": int(row[0])}

def batches():
    yield {"x": X[:4], "labels": np.arange(4)}
    yield {"x": X[4:], "labels": np.arange(4, 6)}

def reused():
    buffer = np.empty(2, np.float32)
    for row in X:
        buffer[:] = row
        yield {"x": buffer}

def doubles():
    return [{"x": row.tolist()} for row in X]

READY = [{"x": X}]

def endless():
    while True:
        yield {"x": X[:4] + 1}

def none():
    return iter(())

def raises():
    yield {"x": X}
    raise KeyError("no more disk")

def raises_at_once():
    raise OSError("the server is gone")

def no_dict():
    yield X

def one_dict():
    return {"x": X}

def number():
    return 3

def other_names():
    yield {"y": X}

def more_names():
    yield {"x": X, "y": X}

def other_rank():
    yield {"x": X[None]}

def uneven():
    yield {"x": np.ones(2, np.float32)}
    yield {"x": np.ones(3, np.float32)}

def fewer_labels():
    yield {"x": X, "labels": np.arange(5)}

def no_rows():
    while True:
        yield {"x": X[:0]}

def objects():
    yield {"x": [None, None]}

def shared():
    for row in X:
        yield {"x": row, "table": np.eye(3, dtype=np.float32), "rate": 8}

def shared_in_batches():
    yield {"rate": 8, "table": np.eye(3, dtype=np.float32), "x": X[:3], "labels": np.arange(3)}
    yield {"x": X[3:], "labels": np.arange(3, 6)}

def others():
    for rate in range(2):
        yield {"x": X, "table": np.eye(3, dtype=np.float32), "rate": rate}

class Reader:
    closed = []

    def __iter__(self):
        return endless()

    def close(self):
        self.closed.append(True)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """my_data.py in the current folder, with a module of its own beside it."""
    (tmp_path / "my_data.py").write_text(textwrap.dedent(CODE))
    (tmp_path / "helper_of_my_data.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path / "my_data.py"
    for name in set(sys.modules) - known:
        if "my_data" in name:
            del sys.modules[name]


def opened(name, **options):
    return open_dataset(f"my_data.py:{name}", INPUTS, options=DataOptions(**options))


class TestRows:
    @pytest.mark.parametrize("place", ["my_data", "my_data.py"])
    @pytest.mark.parametrize("name", ["samples", "batches"])
    def test_samples_and_batches(self, place, name):
        data = open_dataset(f"{place}:{name}", INPUTS)
        assert (data.name, len(data), data.notes) == (f"{place}:{name}", 6, ())
        assert np.array_equal(data.arrays["x"], np.arange(12, dtype=np.float32).reshape(6, 2))
        assert len(data.labels) == 6

    @pytest.mark.parametrize("name", ["shared", "shared_in_batches"])
    def test_inputs_without_a_batch_are_one_for_all_samples(self, name):
        inputs = (TensorSpec.parse("table:float32:3,3"), *INPUTS, TensorSpec.parse("rate:int64:"))
        data = open_dataset(f"my_data.py:{name}", inputs)
        feeds = data.batch(4, 2)
        assert (len(data), [*feeds]) == (6, ["table", "x", "rate"])
        assert (feeds["table"].tolist(), feeds["rate"].item()) == (np.eye(3).tolist(), 8)
        assert feeds["x"].tolist() == [[8, 9], [10, 11]]
        with pytest.raises(DataError, match="yield 1: 'rate' is another array than before"):
            open_dataset("my_data.py:others", inputs)

    def test_a_file_anywhere_with_what_lies_beside_it(self, module, monkeypatch, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert len(open_dataset(f"{module}:samples", INPUTS)) == 6

    def test_lists_are_cast_as_arrays_are(self):
        assert opened("doubles").arrays["x"].dtype == np.float32

    def test_what_can_be_walked_through_without_a_call(self):
        assert len(opened("READY")) == 6

    def test_the_digest_is_of_the_numbers(self):
        assert opened("reused").digest == opened("READY").digest == opened("doubles").digest
        assert opened("samples").digest != opened("batches").digest  # their labels differ

    def test_the_file_is_known_to_have_been_read(self, module):
        for _ in range(2):  # the second time Python reads no more than the compiled file
            with track_files(allow_pickle=False) as tracker:
                opened("samples")
            assert {module, module.with_name("helper_of_my_data.py")} <= tracker.files
            for name in [name for name in sys.modules if "my_data" in name]:
                del sys.modules[name]


class TestEndless:
    def test_stopped_after_so_many_rows(self):
        data = opened("endless", most_rows=10)
        assert len(data) == 12
        assert data.notes == ("my_data.py:endless was stopped after 12 rows, and may have more",)

    def test_stopped_after_so_many_bytes(self, monkeypatch):
        monkeypatch.setattr(feeds, "MOST_BYTES", 100)
        assert len(opened("endless")) == 16


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "yielded nothing"),
        ("raises", "raised KeyError: 'no more disk'"),
        ("raises_at_once", "raised OSError: the server is gone"),
        ("no_dict", "yielded ndarray, expected a dict"),
        ("one_dict", "gives dict, expected dicts one after another"),
        ("number", "gives int, expected dicts"),
        ("other_names", "yield 0 holds 'y', and the model takes 'x'"),
        ("more_names", "holds 'x', 'y', and the model takes 'x'"),
        ("other_rank", r"yield 0 has the shapes x \[1, 6, 2\], expected those of x:float32:batch,2"),
        ("uneven", r"yield 1, is x: float32\[3\], and the first x: float32\[2\]"),
        ("fewer_labels", r"has the shapes x \[6, 2\], labels \[5\]"),
        ("objects", "yield 0: 'x' is no array of numbers"),
        ("absent", "my_data.py has no function 'absent'"),
    ],
)
def test_functions_that_do_not_work(name, said):
    with pytest.raises(DataError, match=said) as caught:
        opened(name)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere_at_all:f", "importing the data's module nowhere_at_all raised ModuleNotFoundError"),
        ("nowhere.py:f", "there is no file nowhere.py"),
    ],
)
def test_modules_that_are_not_there(reference, said):
    with pytest.raises(DataError, match=said):
        open_dataset(reference, INPUTS)


def test_a_module_that_raises_is_imported_again_once_it_is_mended(module):
    text = module.read_text()
    module.write_text("1 / 0\n" + text)
    with pytest.raises(DataError, match=r"importing the data's module my_data\.py raised ZeroDivisionError"):
        opened("samples")
    module.write_text(text)
    assert len(opened("samples")) == 6


def test_our_own_refusals_pass_through():
    with pytest.raises(SourceError, match="pickle"), user_code.blame_user_code("it"):
        raise SourceError("pickle", "no")


def test_a_full_disk_is_one_clear_error(monkeypatch):
    import io

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(feeds.tempfile, "TemporaryFile", Full)
    with pytest.raises(DataError, match="No space left on device after 0 bytes") as caught:
        opened("samples")
    assert "TMPDIR" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("m:f", True), ("a.b:f.g", True), ("dir/m.py:f", True), ("digits/test", False), ("a/b:f", False), ("m:", False)],
)
def test_what_names_a_function(text, is_one):
    assert user_code.is_reference(text) == is_one


MOVED = """
import numpy as np

def whole():
    yield {"x": np.ones((1, 6), np.float32), "state": np.ones((2, 1, 4), np.float32), "labels": np.ones(1)}
"""


@pytest.mark.parametrize("reference", ["moved.py:whole", "moved.npz"])
def test_arrays_with_the_batch_where_the_model_has_it_are_told_to_have_samples_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved.py").write_text(MOVED)
    np.savez("moved.npz", x=np.ones((1, 6), np.float32), state=np.ones((2, 1, 4), np.float32))
    inputs = [TensorSpec.parse(text) for text in ("x:float32:batch,6", "state:float32:2,batch,4")]
    with pytest.raises(DataError) as error:
        open_dataset(reference, inputs)
    alone = "; or one sample alone, every array without its batch: 'state' as [2, 4]"
    assert error.value.remedy.endswith(
        "samples come first, wherever the model has its batch: give 'state' as [1, 2, 4]"
        + (alone if reference.endswith("whole") else "")
    )
