"""Data in: what is accepted, what is refused and why, and how rows are drawn."""

import hashlib
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save_file

from enginesmith.calibration.dataset import (
    Dataset,
    check_parts,
    count_parts,
    embedded,
    open_dataset,
    split_rows,
    synthetic,
)
from enginesmith.calibration.file_formats import Request, check_readable
from enginesmith.calibration.lazy_arrays import Cast, Picked
from enginesmith.calibration.options import PARTS, DataOptions, PartOptions
from enginesmith.calibration.synthetic import lazy_synthetic
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import TensorSpec

IMAGE = (TensorSpec.parse("image:float32:batch,2,3"),)
TEXT = (TensorSpec.parse("ids:int64:batch,sequence"), TensorSpec.parse("mask:int64:batch,sequence"))


def rows(count=5):
    return np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)


def numbered(count, labels=None):
    return Dataset("numbered", {"x": np.arange(count, dtype=np.float32)[:, None]}, labels)


@pytest.fixture
def saved(tmp_path):
    """Saves arrays as samples.npz and returns the path as a reference."""

    def save(**arrays):
        np.savez(tmp_path / "samples.npz", **arrays)
        return str(tmp_path / "samples.npz")

    return save


class TestDataset:
    def test_batches_wrap_round(self):
        data = numbered(5)
        assert data.batch(3, 4)["x"].ravel().tolist() == [3, 4, 0, 1]
        assert data.batch(5, 2)["x"].ravel().tolist() == [0, 1]
        assert data.batch(1, 12)["x"].ravel().tolist() == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
        assert data.batch(0, 5)["x"].flags["C_CONTIGUOUS"]

    def test_inputs_without_a_batch_are_given_once(self, saved):
        inputs = [TensorSpec.parse(text) for text in ("image:float32:batch,2,3", "rate:int64:", "table:float32:2,n")]
        table = np.ones((2, 5), np.float32)
        arrays = {"image": rows(), "labels": np.arange(5), "rate": np.int64(16_000), "table": table}
        data = open_dataset(saved(**arrays), inputs)
        feeds = data.take(np.array([3]), "one").batch(0, 2)
        assert {name: value.shape for name, value in feeds.items()} == {"image": (2, 2, 3), "rate": (), "table": (2, 5)}
        assert (len(data), feeds["rate"].item()) == (5, 16_000)
        others = [
            open_dataset(saved(**{**arrays, "rate": np.int64(8_000)}), inputs),
            open_dataset(saved(**arrays), inputs),
        ]
        assert [other.digest == data.digest for other in others] == [False, True]
        for made in (synthetic(inputs, feeds, {}, 4, 0), lazy_synthetic(inputs, feeds, {}, 4, 0)):
            assert made.batch(0, 3)["rate"].item() == 16_000
            assert made.batch(0, 3)["image"].shape == (3, 2, 3)
        for wrong in (np.full(5, 16_000), np.full((), 16_000.5)):
            with pytest.raises(DataError, match="'rate'"):
                open_dataset(saved(**{**arrays, "rate": wrong}), inputs)
        with pytest.raises(DataError, match="NaN or infinity"):
            open_dataset(saved(**{**arrays, "table": np.full((2, 5), np.inf, np.float32)}), inputs)
        with pytest.raises(DataError, match="the model takes 'image', 'rate'"):
            open_dataset(saved(image=rows(), table=table), inputs)

    def test_samples_are_put_where_the_model_has_its_batch(self, saved):
        inputs = [TensorSpec.parse(text) for text in ("x:float32:batch,7", "h:float32:2,batch,3")]
        x, h = np.random.default_rng(0).random((5, 7), np.float32), rows()
        data = open_dataset(saved(x=x, h=h), inputs)
        feeds = data.batch(3, 4)
        assert (len(data), feeds["h"].shape, feeds["h"].flags["C_CONTIGUOUS"]) == (5, (2, 4, 3), True)
        np.testing.assert_array_equal(feeds["h"][:, 2], h[0])
        np.testing.assert_array_equal(feeds["x"][2], x[0])
        np.testing.assert_array_equal(data.take(np.array([4]), "one").batch(0, 1)["h"][:, 0], h[4])
        for made in (synthetic(inputs, feeds, {}, 4, 0), lazy_synthetic(inputs, feeds, {}, 4, 0)):
            assert {name: value.shape for name, value in made.batch(0, 4).items()} == {"x": (4, 7), "h": (2, 4, 3)}
        with pytest.raises(DataError, match="expected"):
            open_dataset(saved(x=x, h=np.moveaxis(h, 0, 1)), inputs)

    def test_batches_of_mapped_rows_may_be_written_to(self, tmp_path):
        np.save(tmp_path / "x.npy", rows())
        data = open_dataset(str(tmp_path / "x.npy"), IMAGE)
        assert not data.arrays["image"].flags.writeable
        batch = data.batch(1, 2)["image"]
        assert type(batch) is np.ndarray
        batch[:] = 0
        assert np.array_equal(data.arrays["image"], rows())

    def test_batches_are_aligned(self):
        shifted = np.zeros(5 * 4 + 1, np.uint8)[1:].view(np.float32)
        assert not shifted.flags.aligned
        assert Dataset("x", {"x": shifted}).batch(1, 2)["x"].flags.aligned

    def test_digest_is_of_names_dtypes_shapes_bytes_and_labels(self):
        x = np.zeros((4, 2), np.float32)
        different = [
            Dataset("a", {"x": x}),
            Dataset("a", {"y": x}),
            Dataset("a", {"x": x.astype(np.int32)}),
            Dataset("a", {"x": x.reshape(2, 4)}),
            Dataset("a", {"x": x + 1}),
            Dataset("a", {"x": x}, np.zeros(4, np.int64)),
        ]
        assert len({data.digest for data in different}) == len(different)

    def test_digest_ignores_the_name_and_the_order_of_arrays(self):
        x, y = rows(), rows() + 1
        assert Dataset("a", {"x": x, "y": y}).digest == Dataset("b", {"y": y, "x": x}).digest

    def test_digest_in_pieces_is_that_of_the_whole(self, monkeypatch):
        data = Dataset("a", {"x": rows(7)})
        monkeypatch.setattr("enginesmith.calibration.lazy_arrays.AT_ONCE_BYTES", 50)
        whole = hashlib.sha256(b"input x\0float32\0(7, 2, 3)\0" + rows(7).tobytes()).hexdigest()
        assert data.digest == whole
        assert Dataset("a", {"x": Picked(rows(9), np.arange(7))}).digest == whole
        assert Dataset("a", {"x": Cast(rows(7).astype(np.float64), "float32")}).digest == whole

    def test_sample_is_stratified_seeded_and_aligned(self):
        labels = np.repeat([0, 1, 2], [60, 30, 10])
        data = numbered(100, labels)
        drawn = data.sample(10, seed=3)
        assert Counter(drawn.labels.tolist()) == {0: 6, 1: 3, 2: 1}
        picked = drawn.arrays["x"].ravel().astype(int)
        assert len(set(picked)) == 10
        assert np.array_equal(labels[picked], drawn.labels)
        assert drawn.digest == data.sample(10, seed=3).digest
        assert drawn.digest != data.sample(10, seed=4).digest

    def test_rounding_of_shares_still_gives_the_count(self):
        data = numbered(9, np.repeat([0, 1, 2], 3))
        assert [len(data.sample(count, seed=0)) for count in range(1, 9)] == list(range(1, 9))

    @pytest.mark.parametrize("labels", [None, np.linspace(0, 1, 50), np.zeros((50, 4), np.int64)])
    def test_sample_without_classes(self, labels):
        drawn = numbered(50, labels).sample(20, seed=0)
        assert len(set(drawn.arrays["x"].ravel())) == len(drawn) == 20

    def test_sample_of_everything_is_the_set_itself(self):
        data = numbered(5)
        assert data.sample(5, seed=0) is data
        assert (data.rows, data.whole) == ((0, 1, 2, 3, 4), data)

    def test_fewer_samples_than_asked_for_are_noted(self):
        data = numbered(5)
        drawn = data.sample(50, seed=0)
        assert drawn.notes == ("50 samples are asked for, and numbered has 5",)
        assert (drawn.digest, drawn.rows, drawn.whole) == (data.digest, data.rows, data)
        assert data.sample(4, seed=0).notes == ()

    def test_a_sample_knows_its_rows_and_the_set_that_they_are_of(self):
        data = numbered(100)
        first = data.sample(50, seed=1)
        drawn = first.sample(10, seed=2)
        assert drawn.rows == tuple(drawn.arrays["x"].ravel().astype(int))
        assert list(drawn.rows) == sorted(drawn.rows)
        found = drawn.provenance(seed=2, batch=4)
        assert (found.data, found.digest, found.rows) == ("numbered", data.digest, drawn.rows)
        assert (found.seed, found.batch, found.synthetic) == (2, 4, False)

    def test_a_sample_of_mapped_rows_reads_none_of_them(self, saved):
        data = open_dataset(saved(image=rows(50), labels=np.arange(50)), IMAGE)
        drawn = data.sample(9, seed=0)
        assert isinstance(drawn.arrays["image"], Picked)
        assert np.array_equal(drawn.batch(0, 9)["image"], rows(50)[list(drawn.rows)])
        assert np.array_equal(drawn.batch(8, 2)["image"], rows(50)[[drawn.rows[8], drawn.rows[0]]])
        assert drawn.labels.tolist() == list(drawn.rows)
        assert drawn.digest == Dataset("", {"image": rows(50)[list(drawn.rows)]}, drawn.labels).digest

    def test_a_sample_of_nothing(self):
        with pytest.raises(DataError, match="0 samples of numbered"):
            numbered(5).sample(0, seed=0)


class TestParts:
    LABELS = np.repeat(np.arange(4), [100, 60, 30, 10])

    def parts(self, count=200, most=None, sharing=PARTS):
        return split_rows(numbered(count, self.LABELS[:count]), sharing, most)

    def test_they_are_disjoint_whole_and_always_the_same(self):
        found, again = self.parts(most=50), self.parts(most=50)
        assert sorted(np.concatenate(list(found.values())).tolist()) == list(range(200))
        assert all(np.array_equal(found[name], again[name]) for name in PARTS)

    def test_each_class_is_in_each_part_in_proportion(self):
        for rows in self.parts().values():
            shares = np.bincount(self.LABELS[rows], minlength=4) / len(rows)
            assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 1 / len(rows)

    def test_rows_are_not_in_the_order_of_the_file(self):
        assert len(set(self.LABELS[self.parts()["choice"][:8]].tolist())) > 1

    @pytest.mark.parametrize(
        ("count", "most", "sharing", "sizes"),
        [
            (200, 128, PARTS, [66, 67, 67]),
            (200, 40, PARTS, [40, 80, 80]),
            (200, None, PARTS, [66, 67, 67]),
            (199, 40, PARTS, [40, 79, 80]),
            (24, 128, PARTS, [8, 8, 8]),
            (199, 40, PARTS[1:], [99, 100]),
            (199, 40, PARTS[:2], [40, 159]),
            (199, 128, PARTS[:2], [99, 100]),
            (199, 128, PARTS[1:2], [199]),
        ],
    )
    def test_sizes(self, count, most, sharing, sizes):
        assert [len(rows) for rows in self.parts(count, most, sharing).values()] == sizes

    @pytest.mark.parametrize(("count", "sharing", "needed"), [(23, PARTS, 24), (15, PARTS[1:], 16)])
    def test_too_few(self, count, sharing, needed):
        said = f"numbered has {count} samples, and {needed} are needed: 8 each for {', '.join(sharing)}"
        with pytest.raises(DataError, match=f"{said}\n.*--calibration DATA"):
            self.parts(count, sharing=sharing)

    @pytest.mark.parametrize(
        ("changes", "labels", "notes"),
        [
            ({}, np.arange(40) % 4, []),
            ({}, None, []),
            ({5: 6, 7: 6}, np.arange(40) % 4, ["2 of 40 samples of samples.npz are copies of others"]),
            ({}, np.full(40, 3), ["all samples of samples.npz have the label 3: no metric"]),
            ({}, np.maximum(np.arange(40), 2) % 38, ["37 of 38 classes of samples.npz have too few samples"]),
            ({}, np.arange(40) / 8, []),
        ],
    )
    def test_what_makes_parts_tell_less_is_noted(self, saved, changes, labels, notes):
        image = rows(40)
        for row, other in changes.items():
            image[row] = image[other]
        path = saved(image=image, **({} if labels is None else {"labels": labels}))
        options = PartOptions(part="choice")
        data = open_dataset(path, IMAGE, options=options)
        assert count_parts(data, path, options) == {"calibration": 13, "choice": 13, "judgement": 14}
        found = check_parts(data)
        assert len(found) == len(notes)
        assert all(found[index].startswith(note) for index, note in enumerate(notes))

    def test_a_file_is_opened_in_parts(self, saved):
        path = saved(image=rows(40), labels=np.arange(40) % 2)
        opened = [open_dataset(path, IMAGE, options=PartOptions(part=part)) for part in PARTS]
        sizes = {"calibration": 13, "choice": 13, "judgement": 14}
        assert [data.name for data in opened] == [f"samples.npz ({part}: {sizes[part]} of 40)" for part in PARTS]
        assert sorted(row for data in opened for row in data.rows) == list(range(40))
        assert all(np.array_equal(data.batch(2, 1)["image"][0], rows(40)[data.rows[2]]) for data in opened)
        few = opened[0].sample(4, seed=3)
        assert set(few.rows) < set(opened[0].rows)

    @pytest.mark.parametrize(
        ("sharing", "sizes"), [(PARTS, [240, 178, 179]), (PARTS[1:], [240, 178, 179]), (PARTS[:2], [240, 357, 357])]
    )
    def test_an_embedded_set_keeps_its_calibration(self, sharing, sizes):
        image = (TensorSpec.parse("image:float32:batch,1,8,8"),)
        splits = {"calibration": "calibration", "choice": "test", "judgement": "test"}
        opened = [
            open_dataset("digits", image, split=split, options=PartOptions(part=part, shared_by=sharing))
            for part, split in splits.items()
        ]
        assert [len(data) for data in opened] == sizes
        counts = count_parts(opened[1], "digits", PartOptions(part="choice", shared_by=sharing))
        assert counts == {part: size for part, size in zip(PARTS, sizes, strict=True) if part in sharing}
        assert len(open_dataset("digits/test", image, options=PartOptions(part="calibration"))) == 119


class TestEmbedded:
    def test_splits_are_stratified_and_whole(self):
        splits = {name: embedded("digits", name) for name in ("train", "calibration", "test")}
        assert {name: len(data) for name, data in splits.items()} == {"train": 1200, "calibration": 240, "test": 357}
        for name, data in splits.items():
            assert (data.name, data.arrays["image"].shape) == (f"digits/{name}", (len(data), 1, 8, 8))
            assert (data.arrays["image"].dtype, data.labels.dtype) == (np.float32, np.int64)
            assert (data.arrays["image"].min(), data.arrays["image"].max()) == (0, 1)
            shares = np.bincount(data.labels) / len(data)
            assert shares.shape == (10,)
            assert shares.min() > 0.09
            assert shares.max() < 0.11

    def test_no_image_lies_in_two_splits(self):
        seen = [
            {image.tobytes() for image in embedded("digits", split).arrays["image"]}
            for split in ("train", "calibration", "test")
        ]
        assert len(set.union(*seen)) == sum(map(len, seen)) == 1797

    @pytest.mark.thorough
    def test_is_scikit_learns_copy_split_by_the_script(self, tmp_path, monkeypatch):
        from enginesmith.calibration import make_digits

        committed = make_digits.FILE
        monkeypatch.setattr(make_digits, "FILE", tmp_path / "digits.npz")
        make_digits.main()
        with np.load(committed) as ours, np.load(tmp_path / "digits.npz") as again:
            assert ours.files == again.files
            assert all(np.array_equal(ours[name], again[name]) for name in ours.files)


class TestOpen:
    DIGITS = (TensorSpec.parse("image:float32:batch,1,8,8"),)

    @pytest.mark.parametrize(
        ("reference", "name"),
        [
            ("digits", "digits/calibration"),
            ("digits/calibration", "digits/calibration"),
            ("digits/test", "digits/test"),
            ("digits/train", "digits/train"),
        ],
    )
    def test_embedded(self, reference, name):
        data = open_dataset(reference, self.DIGITS)
        assert (data.name, data.digest) == (name, embedded(*name.split("/")).digest)

    def test_a_bare_name_means_the_split_that_is_asked_for(self):
        assert open_dataset("digits", self.DIGITS, split="test").name == "digits/test"

    def test_npz_with_labels(self, saved):
        data = open_dataset(saved(image=rows(), labels=np.arange(5)), IMAGE)
        assert (data.name, len(data), list(data.arrays)) == ("samples.npz", 5, ["image"])
        assert data.labels.tolist() == [0, 1, 2, 3, 4]

    def test_npz_is_memory_mapped(self, saved):
        columns = np.asfortranarray(rows()[:, :, 0])
        specs = (*IMAGE, TensorSpec.parse("columns:float32:batch,2"))
        data = open_dataset(saved(image=rows(), columns=columns, labels=np.arange(5)), specs)
        assert all(isinstance(array, np.memmap) for array in data.arrays.values())
        assert np.array_equal(data.arrays["image"], rows())
        assert np.array_equal(data.batch(3, 3)["columns"], columns[[3, 4, 0]])

    def test_the_same_numbers_have_the_same_digest_in_any_file(self, tmp_path):
        np.savez(tmp_path / "a.npz", image=rows())
        np.savez_compressed(tmp_path / "b.npz", image=rows())
        np.save(tmp_path / "c.npy", rows().astype(np.float64))
        save_file({"image": rows()}, tmp_path / "d.safetensors")
        opened = [open_dataset(str(path), IMAGE) for path in sorted(tmp_path.iterdir())]
        assert {data.digest for data in opened} == {Dataset("", {"image": rows()}).digest}

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("name", ["large.npy", "large.npz"])
    def test_large_data_are_never_in_memory_as_a_whole(self, tmp_path, monkeypatch, name, dtype):
        monkeypatch.setattr("enginesmith.calibration.lazy_arrays.AT_ONCE_BYTES", 1 << 16)
        array = np.ones((4096, 256), dtype)
        array[-1] = 2
        (np.save if name.endswith("npy") else lambda path, x: np.savez(path, x=x))(tmp_path / name, array)
        size = array.nbytes
        del array
        tracemalloc.start()
        data = open_dataset(str(tmp_path / name), (TensorSpec.parse("x:float32:batch,256"),)).sample(4000, seed=0)
        assert len(data.digest) == 64
        assert data.batch(4, 2)["x"].shape == (2, 256)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size / 3  # an array of float32 made of float64 would be half of it

    def test_several_arrays_of_labels(self, saved):
        path = saved(image=rows(), kind=np.arange(5) % 2, box=np.ones((5, 4)))
        data = open_dataset(path, IMAGE, options=DataOptions(labels="kind,box"))
        assert {key: array.shape for key, array in data.sample(2, seed=0).labels.items()} == {
            "kind": (2,),
            "box": (2, 4),
        }
        assert data.one_label is None
        assert data.digest == open_dataset(path, IMAGE, options=DataOptions(labels="box,kind")).digest
        with pytest.raises(DataError, match=r"no labels 'boxes'; its arrays, .* are 'kind', 'box'\n.*as --labels A,B"):
            open_dataset(path, IMAGE, split="test", options=DataOptions(labels="kind, boxes"))

    def test_labels_of_another_name(self, saved):
        data = open_dataset(saved(image=rows(), target=np.arange(5)), IMAGE, options=DataOptions(labels="target"))
        assert data.labels.tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("name", ["label", "y", "anything"])
    def test_the_key_that_may_hold_the_labels_is_named(self, saved, name):
        with pytest.raises(DataError, match=f"'{name}'.*\n.*did you mean --labels {name}"):
            open_dataset(saved(**{"image": rows(), name: np.arange(5)}), IMAGE)

    @pytest.mark.parametrize(
        ("labels", "advice"),
        [("category", "did you mean --labels category,score"), ("", "name them, as --labels category,score")],
    )
    def test_several_arrays_that_may_hold_labels_are_named(self, saved, labels, advice):
        place = saved(image=rows(), score=np.arange(5), category=np.arange(5))
        options = DataOptions(labels=labels or None)
        request = Request(IMAGE, "test", options)
        for check in (lambda: open_dataset(place, IMAGE, options=options), lambda: check_readable(place, request)):
            with pytest.raises(DataError, match=advice):
                check()

    def test_what_is_beside_labels_is_not_called_labels(self, saved):
        place = saved(image=rows(), token_type_ids=np.zeros((5, 3), np.int64), labels=np.arange(5))
        for check in (lambda: open_dataset(place, IMAGE), lambda: check_readable(place, Request(IMAGE))):
            with pytest.raises(DataError, match="holds 'image', 'token_type_ids'") as caught:
                check()
            assert "--labels" not in str(caught.value)
            assert "--input" in str(caught.value)

    def test_what_tokenizers_make_is_an_input_and_no_labels(self, saved):
        inputs = [TensorSpec.parse("input_ids:int64:batch,length")]
        place = saved(input_ids=np.ones((5, 3), np.int64), token_type_ids=np.ones((5, 3), np.int64))
        with pytest.raises(DataError) as caught:
            check_readable(place, Request(inputs))
        assert "--labels" not in str(caught.value)
        more = "--input input_ids:int64:batch,length --input token_type_ids:int64:batch,length"
        assert str(caught.value).endswith(f"if the model takes token_type_ids, too: {more}")

    @pytest.mark.parametrize("labels", ["labels", "y"])
    def test_inputs_may_be_chosen_by_the_arrays_that_are_no_labels(self, saved, labels):
        place = saved(**{"image": rows(), "mask": np.ones((5, 2), np.float32), labels: np.arange(5)})
        seen = []

        def choose(arrays):
            seen.extend(map(str, arrays))
            return [*IMAGE, TensorSpec.parse("mask:float32:batch,2")]

        data = open_dataset(place, IMAGE, options=DataOptions(labels=labels), choose=choose)
        assert seen == [f"image:float32:{','.join(map(str, rows().shape))}", "mask:float32:5,2"]
        assert list(data.arrays) == ["image", "mask"]
        assert data.labels.tolist() == [0, 1, 2, 3, 4]
        if labels == "y":  # which looks like labels, also where it is not named
            with pytest.raises(DataError, match=r"--labels y.* all of them: these are --input image:.* --input mask:"):
                open_dataset(place, IMAGE, choose=choose)
            assert seen[2:] == seen[:2]

    def test_labels_that_are_asked_for_and_not_there(self, saved):
        place, options = saved(image=rows()), DataOptions(labels="y")
        with pytest.raises(DataError, match=r"no labels 'y', and nothing else.*\n.*omit --labels"):
            open_dataset(place, IMAGE, split="test", options=options)
        assert open_dataset(place, IMAGE, options=options).labels is None  # calibration needs none

    def test_an_input_that_is_called_labels_is_an_input(self, saved):
        data = open_dataset(saved(labels=np.arange(3)), (TensorSpec.parse("labels:int64:batch"),))
        assert list(data.arrays) == ["labels"]
        assert data.labels is None

    def test_npy_for_two_inputs(self, tmp_path):
        np.save(tmp_path / "one.npy", np.zeros((2, 4), np.int64))
        with pytest.raises(DataError, match="takes 2 inputs: ids, mask"):
            open_dataset(str(tmp_path / "one.npy"), TEXT)

    def test_safetensors(self, tmp_path):
        save_file({"image": rows(), "labels": np.arange(5)}, tmp_path / "s.safetensors")
        data = open_dataset(str(tmp_path / "s.safetensors"), IMAGE)
        assert isinstance(data.arrays["image"], np.memmap)
        assert np.array_equal(data.arrays["image"], rows())
        assert data.labels.tolist() == [0, 1, 2, 3, 4]

    def test_arrays_come_in_the_order_of_the_inputs(self, saved):
        ids = np.ones((2, 4), np.int64)
        assert list(open_dataset(saved(mask=ids, ids=ids), TEXT).arrays) == ["ids", "mask"]

    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (np.float64, "float32"),
            (">f8", "float32"),
            (">i4", "int64"),
            (np.float16, "float32"),
            (np.float32, "float64"),
            (np.int32, "int64"),
            (np.uint16, "int64"),
        ],
    )
    def test_safe_casts(self, saved, given, wanted):
        data = open_dataset(saved(x=np.ones((2, 3), given)), (TensorSpec.parse(f"x:{wanted}:batch,3"),))
        assert data.arrays["x"].dtype == wanted

    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (np.int64, "int32"),
            (np.uint8, "float32"),
            (np.float32, "float16"),
            (np.int64, "float32"),
            (np.uint64, "int64"),
            (bool, "int64"),
        ],
    )
    def test_other_casts_are_refused(self, saved, given, wanted):
        with pytest.raises(DataError, match=f"'x' is {np.dtype(given)}, expected {wanted}"):
            open_dataset(saved(x=np.ones((2, 3), given)), (TensorSpec.parse(f"x:{wanted}:batch,3"),))

    @pytest.mark.parametrize(
        ("arrays", "said"),
        [
            ({}, "holds nothing, and the model takes 'image'"),
            ({"picture": rows()}, "holds 'picture', and the model takes 'image'"),
            ({"image": rows(), "label": np.arange(5)}, "holds 'image', 'label'"),
            ({"image": rows().reshape(5, 6)}, r"\[5, 6\], expected \[samples, 2, 3\]"),
            ({"image": rows().reshape(5, 3, 2)}, r"\[5, 3, 2\], expected \[samples, 2, 3\]"),
            ({"image": np.float32(1)}, r"has the shape \[\]"),
            ({"image": rows(0)}, "is empty"),
            ({"image": rows(), "labels": np.arange(4)}, r"'labels' has the shape \[4\], and the inputs have 5 rows"),
            ({"image": rows(), "labels": np.int64(1)}, r"'labels' has the shape \[\]"),
            ({"image": np.where(rows() == 13, np.inf, rows()).astype(np.float32)}, "infinity, first in row 2"),
            ({"image": np.where(rows() == 29, -np.inf, rows()).astype(np.float32)}, "infinity, first in row 4"),
            ({"image": rows().astype(np.float64) * 1e300}, "infinity"),
        ],
    )
    def test_refused(self, saved, arrays, said):
        with pytest.raises(DataError, match=said) as caught:
            open_dataset(saved(**arrays), IMAGE)
        assert "samples.npz" in caught.value.message
        assert caught.value.remedy

    def test_missing_values_are_told(self, saved):
        image = np.where((rows() == 13) | (rows() == 29), np.nan, rows()).astype(np.float32)
        data = open_dataset(saved(image=image), IMAGE)
        assert data.notes == ("'image' has NaN in 2 of 5 rows of samples.npz: the model is given them as they are",)
        assert data.missing == {"image": 2}
        assert data.take(np.array([4]), "one").missing == {"image": 2}, "it is a row of the whole set"
        assert not open_dataset(saved(image=rows()), IMAGE).missing

    def test_rows_differ(self, saved):
        with pytest.raises(DataError, match="ids 3, mask 2"):
            open_dataset(saved(ids=np.zeros((3, 4), np.int64), mask=np.zeros((2, 4), np.int64)), TEXT)

    def test_a_shared_dimension_differs(self, saved):
        with pytest.raises(DataError, match=r"'mask' has the shape \[3, 5\], expected \[samples, 4\]"):
            open_dataset(saved(ids=np.zeros((3, 4), np.int64), mask=np.zeros((3, 5), np.int64)), TEXT)

    @pytest.mark.parametrize(
        ("reference", "said"),
        [
            ("nowhere.npz", r"no data file nowhere\.npz"),
            ("images", "cannot tell what data 'images' is"),
            ("digits/tset", "no embedded data set digits/tset"),
        ],
    )
    def test_unknown_references(self, reference, said):
        with pytest.raises(DataError, match=said) as caught:
            open_dataset(reference, IMAGE)
        assert caught.value.remedy

    @pytest.mark.parametrize("name", ["x.npz", "x.npy", "x.safetensors"])
    @pytest.mark.parametrize("content", [b"", b"not what it says it is"])
    def test_damaged_files(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot read"):
            open_dataset(str(tmp_path / name), IMAGE)

    @pytest.mark.parametrize(
        ("name", "save"), [("x.npz", np.save), ("x.npy", lambda file, array: np.savez(file, image=array))]
    )
    def test_a_file_under_the_name_of_the_other_kind(self, tmp_path, name, save):
        with (tmp_path / name).open("wb") as file:
            save(file, rows())
        with pytest.raises(DataError, match=r"cannot read .*: it holds"):
            open_dataset(str(tmp_path / name), IMAGE)

    def test_a_dtype_that_numpy_lacks(self, tmp_path):
        header = b'{"image":{"dtype":"BF16","shape":[1,2,3],"data_offsets":[0,12]}}'
        (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
        with pytest.raises(DataError, match="bfloat16"):
            open_dataset(str(tmp_path / "b.safetensors"), IMAGE)

    def test_a_truncated_array(self, tmp_path):
        np.save(tmp_path / "whole.npy", rows(200))
        (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-4])
        with pytest.raises(DataError, match=r"cannot read .*cut\.npy: it is cut off: float32\[200, 2, 3\]"):
            open_dataset(str(tmp_path / "cut.npy"), IMAGE)

    @pytest.mark.parametrize("save", [np.save, lambda path, array: np.savez(path, image=array)])
    def test_objects_are_never_unpickled(self, tmp_path, save):
        path = tmp_path / ("o.npy" if save is np.save else "o.npz")
        save(path, np.array([{"a": 1}, None], dtype=object))
        with pytest.raises(DataError, match="cannot read") as caught:
            open_dataset(str(path), IMAGE)
        assert "never loaded" in caught.value.remedy
