"""Test made-up samples."""

import numpy as np
import pytest

from enginesmith.calibration.dataset import synthetic
from enginesmith.calibration.synthetic import lazy_synthetic
from enginesmith.pipeline.errors import DataError, SignatureError
from enginesmith.pipeline.tensors import TensorSpec

IMAGE = (TensorSpec.parse("image:float32:batch,2,3"),)
TEXT = (TensorSpec.parse("ids:int64:batch,sequence"), TensorSpec.parse("mask:int64:batch,sequence"))


class TestSynthetic:
    def test_floats_look_like_the_example(self):
        example = {"image": np.random.default_rng(0).normal(3, 2, (2, 2, 3)).astype(np.float32)}
        data = synthetic(IMAGE, example, {}, 2000, seed=0)
        made = data.arrays["image"]
        assert (made.shape, made.dtype) == ((2000, 2, 3), np.float32)
        assert abs(made.mean() - example["image"].mean()) < 0.1
        assert abs(made.std() - example["image"].std()) < 0.1
        assert data.name.startswith("synthetic")
        assert data.provenance(0, 1).synthetic
        assert data.labels is None

    def test_integers_and_bools_come_from_the_example(self):
        specs = (*TEXT[:1], TensorSpec.parse("keep:bool:batch,4"))
        example = {"ids": np.array([[5, 9, 9, 9]]), "keep": np.ones((1, 4), bool)}
        made = synthetic(specs, example, {"sequence": 16}, 500, seed=0).arrays
        assert made["ids"].shape == (500, 16)
        assert set(np.unique(made["ids"])) == {5, 9}
        assert 0.7 < (made["ids"] == 9).mean() < 0.8
        assert made["keep"].dtype == bool
        assert made["keep"].all()

    @pytest.mark.parametrize("batch", [0, 1])
    def test_a_value_at_the_same_places_of_all_samples_stays_there(self, batch):
        """Some models need it, as the token that ends a text; where there is one sample, nothing is known of it."""
        ids = np.array([[7, 1, 2, 9, 3], [7, 2, 1, 9, 1]])
        specs = (TensorSpec.parse("ids:int64:batch,sequence" if batch == 0 else "ids:int64:sequence,batch"),)
        example = {"ids": np.moveaxis(ids, 0, batch)}
        for make in (synthetic, lazy_synthetic):
            made = make(specs, example, {"sequence": 7}, 200, seed=0).arrays["ids"][:]
            assert made.shape == (200, 7)
            assert (made == 9).sum(0).tolist() == [0, 0, 0, 200, 0, 0, 0]
            assert (made == 7).sum(0).tolist() == [200, 0, 0, 0, 0, 200, 0]
            assert set(np.unique(made[:, 1])) == {1, 2, 3}
            alone = make(specs, {"ids": np.moveaxis(ids[:1], 0, batch)}, {"sequence": 7}, 200, seed=0).arrays["ids"][:]
            assert (alone == 9).any(0).all()

    def test_one_number_for_each_row_is_drawn_from_its_whole_table(self):
        """A text has places of its own, so the values of the example's stay."""
        specs = tuple(map(TensorSpec.parse, ("step:int32:batch,1", "text:int64:batch,n", "kind:int64:batch")))
        example = {"step": np.array([[3], [5]], np.int32), "text": np.array([[3, 5]] * 2), "kind": np.array([3, 5])}
        tables = {"step": 9, "text": 9}
        digests = set()
        for make in (synthetic, lazy_synthetic):
            made = {
                name: array[:] for name, array in make(specs, example, {"n": 2}, 200, 0, tables=tables).arrays.items()
            }
            assert {name: sorted(set(values.flat)) for name, values in made.items()} == {
                "step": [*range(9)],
                "text": [3, 5],
                "kind": [3, 5],
            }
            assert made["step"].dtype == np.int32
            within = make(specs, example, {"n": 2}, 200, 0, "within", tables=tables).arrays["step"][:]
            assert set(within.flat) == {3, 5}
            digests |= {make(specs, example, {"n": 2}, 20, 0, tables={"step": rows}).digest for rows in (9, 8)}
        assert len(digests) == 4

    @pytest.mark.parametrize("batch", [0, 1])
    def test_what_is_drawn_within_the_example_never_leaves_it(self, batch):
        """Its whole numbers stay together, and the first sample is the longest, whose length another size may be."""
        dims = "batch,time" if batch == 0 else "time,batch"
        specs = tuple(map(TensorSpec.parse, (f"x:float32:{dims}", f"keep:bool:{dims}", "lengths:int64:batch")))
        keep = np.array([[True, True, False], [True, True, True]])
        x = np.random.default_rng(0).random((2, 3), np.float32)
        example = {"x": np.moveaxis(x, 0, batch), "keep": np.moveaxis(keep, 0, batch), "lengths": np.array([2, 3])}
        for make in (synthetic, lazy_synthetic):
            data = make(specs, example, {"time": 5}, 200, seed=0, drawing="within")
            made = {name: data.arrays[name][:] for name in example}
            assert (made["x"].shape, made["x"].dtype) == ((200, 5), np.float32)
            assert x.min() <= made["x"].min() < made["x"].max() <= x.max()
            assert made["lengths"].tolist() == [3, 2] * 100
            assert made["keep"].sum(1).tolist() == [5, 4] * 100
            repeated = make(specs, example, {"time": 3}, 3, seed=0, drawing="repeat")
            assert np.array_equal(repeated.arrays["x"][:], x[[1, 0, 1]])
            assert np.array_equal(repeated.arrays["keep"][:], keep[[1, 0, 1]])

    def test_is_seeded(self):
        example = {"image": np.random.default_rng(0).normal(size=(2, 2, 3)).astype(np.float32)}
        first, same, other = (synthetic(IMAGE, example, {}, 4, seed).digest for seed in (1, 1, 2))
        assert first == same != other

    def test_a_dynamic_dimension_needs_a_size(self):
        with pytest.raises(SignatureError, match="sequence"):
            synthetic(TEXT[:1], {"ids": np.ones((1, 4), np.int64)}, {}, 2, 0)

    @pytest.mark.parametrize(
        ("spec", "example"),
        [
            ("x:float32:", np.float32(1)),
            ("x:float32:batch,3", np.ones((0, 3), np.float32)),
            ("x:float32:batch,1", np.full((1, 1), -np.inf, np.float32)),
        ],
    )
    def test_refused(self, spec, example):
        with pytest.raises(DataError, match="input x:float32"):
            synthetic((TensorSpec.parse(spec),), {"x": np.asarray(example)}, {}, 2, 0)
