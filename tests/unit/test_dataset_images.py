"""Folders of images: which files, which classes, what pixels become, and what is refused."""

import json

import numpy as np
import pytest
from PIL import Image

from enginesmith.calibration.dataset import DataOptions, open_dataset
from enginesmith.calibration.describe import describe
from enginesmith.calibration.image_files import read_header
from enginesmith.calibration.images import ImageRows, listing, preprocessing_for
from enginesmith.calibration.lazy_arrays import digest
from enginesmith.calibration.preprocessing import Preprocessing
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import TensorSpec

RGB = TensorSpec.parse("x:float32:batch,3,8,8")
RAW = TensorSpec.parse("x:uint8:batch,3,8,8")


def pixels(height=8, width=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def put(path, array, orientation=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    Image.fromarray(array).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    """Five different images of 8×8 in one folder."""
    for index in range(5):
        put(tmp_path / "photos" / f"{index}.png", pixels(seed=index))
    return tmp_path / "photos"


def configure(folder, **keys):
    (folder / "preprocessor_config.json").write_text(json.dumps(keys))


def one(folder, spec=RGB, **options):
    return open_dataset(str(folder), (spec,), options=DataOptions(**options)).batch(0, 1)[spec.name][0]


class TestFiles:
    def test_in_order_of_their_names_and_without_labels(self, folder):
        (folder / "readme.txt").write_text("not an image")
        (folder / "._0.png").write_bytes(b"what another system leaves")
        data = open_dataset(str(folder), (RAW,))
        assert (data.name, len(data), data.labels) == ("photos", 5, None)
        for index in range(5):
            assert np.array_equal(data.arrays["x"][index].transpose(1, 2, 0), pixels(seed=index))

    def test_sub_folders_are_classes(self, tmp_path):
        for name, count in (("dog", 1), ("cat", 2), ("dog/young", 1)):
            for index in range(count):
                put(tmp_path / name / f"{index}.png", pixels(seed=len(name) + index))
        data = open_dataset(str(tmp_path), (RAW,))
        assert data.labels.dtype == np.int64
        assert data.labels.tolist() == [0, 0, 1, 1]
        assert "labels from 2 sub-folders" in data.notes
        assert "labels are numbered in alphabetical order: cat = 0, dog = 1" in data.number_words(()).notes
        told = data.number_words(["Dog", "Bird", "Cat"])
        assert told.labels.tolist() == [2, 2, 0, 0]
        assert told.notes[-1] == "labels are numbered as the model's classes are (id2label): dog = 0, cat = 2"
        assert np.array_equal(data.arrays["x"][3].transpose(1, 2, 0), pixels(seed=len("dog/young")))

    def test_classes_that_are_numbers_keep_them(self, tmp_path):
        for name in ("10", "9", "2"):
            put(tmp_path / name / "0.png", pixels())
        (tmp_path / "3").mkdir()
        data = open_dataset(str(tmp_path), (RAW,))
        assert data.labels.tolist() == [2, 9, 10]
        assert data.number_words(["10", "9", "2"]) is data

    def test_an_empty_folder_is_a_class_without_images(self, tmp_path):
        for name in ("ant", "cow"):
            put(tmp_path / name / "0.png", pixels())
        (tmp_path / "bee").mkdir()
        (tmp_path / "bee" / ".gitkeep").touch()
        data = open_dataset(str(tmp_path), (RAW,))
        assert data.labels.tolist() == [0, 2]
        assert data.class_names == {0: "ant", 1: "bee", 2: "cow"}
        assert "labels from 3 sub-folders; without images: bee" in data.notes

    def test_what_is_in_hidden_folders_is_no_sample(self, folder):
        expected = open_dataset(str(folder), (RAW,)).digest
        for name in (".thumbs/x", "__MACOSX"):
            put(folder / name / "9.png", pixels())
        assert open_dataset(str(folder), (RAW,)).digest == expected
        put(folder.parent / "classes" / "cat" / "0.png", pixels())
        put(folder.parent / "classes" / "cat" / ".thumbs" / "x" / "9.png", pixels())
        assert len(open_dataset(str(folder.parent / "classes"), (RAW,))) == 1

    @pytest.mark.parametrize("suffix", [".jfif", ".JPE", ".avif", ".jp2", ".tga", ".pbm"])
    def test_all_suffixes_of_pictures_that_pillow_reads_are_taken(self, folder, suffix):
        if suffix.lower() not in Image.registered_extensions():
            pytest.skip(f"this Pillow reads no {suffix}")
        Image.fromarray(pixels()).save(folder / f"new{suffix}", format=Image.registered_extensions()[suffix.lower()])
        data = open_dataset(str(folder), (RAW,))
        assert (len(data), len(data.notes)) == (6, 1)

    def test_files_that_are_left_out_are_counted(self, folder):
        configure(folder, do_rescale=True)
        (folder / ".DS_Store").touch()
        assert len(open_dataset(str(folder), (RAW,)).notes) == 1
        for name in ("a.heic", "b.heic", "notes.txt", "LICENSE"):
            (folder / name).touch()
        assert open_dataset(str(folder), (RAW,)).notes[1] == (
            "files left out, since Pillow reads no images of their suffixes: 4 (2 .heic, 1 without a suffix, 1 .txt), "
            "such as a.heic"
        )

    def test_what_would_change_the_rows_is_named(self, tmp_path):
        for name in ("cat", "dog/young"):
            put(tmp_path / "set" / name / "0.png", pixels())
        known = {"set", "set/cat", "set/dog", "set/dog/young"}
        root = tmp_path / "set"
        assert {str(each.relative_to(tmp_path)) for each in open_dataset(str(root), (RAW,)).folders} == {*known, "."}
        configure(root, do_rescale=True)  # then nothing is looked for beside the folder
        assert {str(each.relative_to(tmp_path)) for each in open_dataset(str(root), (RAW,)).folders} == known

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ((), "holds no images"),
            (("cat/a.txt",), "holds no images"),
            (("a.png", "cat/b.png"), r"itself and in sub-folders \(cat/b.png\)"),
            (("cat/a.png", "dog/a.txt", "owl/a.png"), r"sub-folder dog of .* no images, but other files \(a.txt\)"),
        ],
    )
    def test_refused(self, tmp_path, files, said):
        for name in files:
            path = put((tmp_path / name).with_suffix(".png"), pixels())
            path.rename(tmp_path / name)
        with pytest.raises(DataError, match=said) as caught:
            open_dataset(str(tmp_path), (RAW,))
        assert caught.value.remedy

    def test_what_is_no_image_is_told_when_the_set_is_opened(self, folder, monkeypatch):
        monkeypatch.setattr("enginesmith.calibration.file_formats._FIRST_LOOK_BYTES", 1)
        (folder / "3.png").write_bytes(b"not an image")
        with pytest.raises(DataError, match=r"cannot read the image .*3\.png"):
            open_dataset(str(folder), (RGB,))

    def test_a_truncated_image_is_told_when_it_is_needed(self, folder, monkeypatch):
        monkeypatch.setattr("enginesmith.calibration.file_formats._FIRST_LOOK_BYTES", 1)
        whole = (folder / "3.png").read_bytes()
        (folder / "3.png").write_bytes(whole[: len(whole) // 2])
        data = open_dataset(str(folder), (RGB,))
        data.batch(0, 3)
        with pytest.raises(DataError, match=r"cannot read the image .*3\.png"):
            data.batch(3, 1)


class TestRows:
    def test_rows_are_decoded_when_they_are_asked_for(self, folder, monkeypatch):
        data = open_dataset(str(folder), (RGB,))
        images = data.arrays["x"]
        assert (images.shape, images.dtype, images.ndim, len(images)) == ((5, 3, 8, 8), np.float32, 4, 5)
        opened = []
        real = Image.open
        monkeypatch.setattr(Image, "open", lambda path: opened.append(path.name) or real(path))
        assert (images[-1].shape, images[1:3].shape) == ((3, 8, 8), (2, 3, 8, 8))
        assert np.array_equal(images[np.array([4, 0])], images[:][[4, 0]])
        assert opened == ["4.png", "1.png", "2.png", "4.png", "0.png", *(f"{index}.png" for index in range(5))]

    def test_neither_sampling_nor_the_digest_decodes(self, folder, monkeypatch):
        data = open_dataset(str(folder), (RGB,))
        monkeypatch.setattr(Image, "open", None)
        assert len(data.sample(3, seed=0)) == 3
        assert data.sample(3, seed=0).digest != data.digest

    def test_the_digest_is_of_the_files_and_of_what_is_done_to_them(self, folder):
        before = open_dataset(str(folder), (RGB,)).digest
        assert open_dataset(str(folder), (RGB,)).digest == before
        assert open_dataset(str(folder), (RGB,), options=DataOptions(mean=(0.5,))).digest != before
        put(folder / "2.png", pixels(seed=9))
        assert open_dataset(str(folder), (RGB,)).digest != before

    def test_a_step_that_a_later_version_adds_changes_no_digest_unless_it_is_taken(self, folder):
        class Later(Preprocessing, frozen=True):
            flip: bool = False

        steps, files = preprocessing_for(RGB, folder, DataOptions()), [*map(read_header, listing(folder).files)]
        values = steps.model_dump()
        before, default, flipped = (
            digest([("x", ImageRows(files, each))]) for each in (steps, Later(**values), Later(**values, flip=True))
        )
        assert before == default != flipped


UPRIGHT = pixels(6, 4)
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT),
    7: np.rot90(UPRIGHT, 2).transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}
"""Stored forms of an image, by the orientation that turns each upright."""
TAG_OF_99 = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0"


class TestOrientation:
    """EXIF's tag 274 says how pixels are to be turned: https://www.cipa.jp/std/documents/e/DC-008-2012_E.pdf, 4.6.4."""

    SPEC = TensorSpec.parse("x:uint8:batch,3,6,4")

    @pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
    @pytest.mark.parametrize("orientation", STORED)
    def test_images_are_turned_upright(self, tmp_path, orientation, suffix):
        lossless = {"lossless": True} if suffix == "webp" else {}
        put(tmp_path / f"a.{suffix}", np.ascontiguousarray(STORED[orientation]), orientation, **lossless)
        data = open_dataset(str(tmp_path), (self.SPEC,))
        assert np.array_equal(data.arrays["x"][0].transpose(1, 2, 0), UPRIGHT)
        noted = suffix != "tif" and orientation != 1  # Pillow turns those itself
        assert ("images turned by their EXIF orientation: 1 of 1, such as a." + suffix in data.notes) == noted
        assert describe(str(tmp_path))["sizes"] == ["6×4: 1"]

    def test_tiff_is_turned_once(self, tmp_path):
        """Pillow turns its pixels itself, whatever else tells the orientation."""
        xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
        put(tmp_path / "a.tif", np.ascontiguousarray(STORED[6]), tiffinfo={700: xmp, 0x0112: 6})
        assert read_header(tmp_path / "a.tif").size == (6, 4)
        assert np.array_equal(one(tmp_path, self.SPEC).transpose(1, 2, 0), UPRIGHT)

    @pytest.mark.parametrize(
        "tags", [b"damaged", TAG_OF_99[:-4], TAG_OF_99], ids=["no tags", "cut off", "no orientation has the number"]
    )
    def test_a_damaged_orientation_is_none(self, tmp_path, tags):
        Image.fromarray(pixels()).save(tmp_path / "a.png", exif=b"Exif\0\0" + tags)
        assert np.array_equal(one(tmp_path, RAW).transpose(1, 2, 0), pixels())

    def test_the_header_alone_is_read(self, folder, monkeypatch):
        """Pillow decodes a whole PNG to look for an orientation behind its pixels."""
        monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", None)
        assert read_header(folder / "0.png").size == (8, 8)

    def test_digests_change_for_turned_images_alone(self, folder):
        """Earlier versions did not turn them: their numbers are of other pixels."""
        files = [*map(read_header, listing(folder).files)]
        put(folder / "5.png", pixels(), 6)
        turned = read_header(folder / "5.png")
        steps = preprocessing_for(RAW, folder, DataOptions())
        with_it, as_stored = (digest([("x", ImageRows([*files, last], steps))]) for last in (turned, turned.as_stored))
        assert with_it != as_stored


class TestDefaults:
    def test_pixels_from_0_to_1_and_it_is_said(self, folder):
        data = open_dataset(str(folder), (RGB,))
        assert np.array_equal(data.arrays["x"][0], pixels().transpose(2, 0, 1).astype(np.float32) * np.float32(1 / 255))
        (note,) = data.notes
        assert note.startswith("images as RGB, as small as covers, center 8×8, divided by 255 (by default")
        assert "no mean" in note

    def test_larger_images_cover_the_size_and_lose_the_edges(self, tmp_path):
        stripes = np.zeros((16, 48, 3), np.uint8)
        stripes[:, 16:32] = 255
        put(tmp_path / "wide.png", stripes)
        put(tmp_path / "tall.png", stripes.transpose(1, 0, 2))
        data = open_dataset(str(tmp_path), (RAW,)).arrays["x"][:]
        assert data[:, :, 1:-1, 1:-1].min() == 255

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("x:uint8:batch,1,8,8", (1, 8, 8)),
            ("x:uint8:batch,4,8,8", (4, 8, 8)),
            ("x:float16:batch,3,8,8", (3, 8, 8)),
            ("x:uint8:batch,8,8,3", (8, 8, 3)),
        ],
    )
    def test_channels_order_and_dtype_are_the_models(self, folder, spec, expected):
        spec = TensorSpec.parse(spec)
        made = one(folder, spec)
        assert (made.shape, str(made.dtype)) == (expected, spec.dtype)

    def test_sixteen_bits_are_scaled_and_not_cut_off(self, tmp_path):
        Image.fromarray(np.full((8, 8), 0x8000, np.uint16)).save(tmp_path / "deep.png")
        assert set(one(tmp_path, RAW).ravel()) == {0x80}
        (tmp_path / "shade.pgm").write_bytes(b"P5 8 8 65535\n" + bytes([0, 200]) * 64)
        assert set(open_dataset(str(tmp_path), (RAW,)).batch(1, 1)["x"].ravel()) == {0}

    @pytest.mark.parametrize("most", [0x8000, 255, 70_000, -1])
    def test_whole_numbers_of_32_bits_have_16_or_no_range(self, tmp_path, most):
        Image.fromarray(np.full((8, 8), most, np.int32)).save(tmp_path / "deep.tif")
        if most == 0x8000:
            assert set(one(tmp_path, RAW).ravel()) == {0x80}
            return
        with pytest.raises(DataError, match=rf"deep\.tif: its pixels are 32-bit whole numbers from {most} to {most}"):
            one(tmp_path, RAW)

    def test_palettes_with_transparency(self, tmp_path):
        image = Image.fromarray(pixels()).quantize(8)
        image.save(tmp_path / "p.png", transparency=bytes(range(8)))
        assert np.array_equal(one(tmp_path, RAW).transpose(1, 2, 0), np.asarray(image.convert("RGB")))

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ("x:float32:batch,192", "no images can be made into"),
            ("x:int64:batch,3,8,8", "no images can be made into"),
            ("x:float32:batch,5,8,8", "images have 1, 3 or 4 channels"),
            ("x:float32:batch,3,height,width", "height and width of .* are dynamic"),
        ],
    )
    def test_inputs_that_are_no_image(self, folder, spec, said):
        with pytest.raises(DataError, match=said) as caught:
            open_dataset(str(folder), (TensorSpec.parse(spec),))
        assert caught.value.remedy


class TestGiven:
    DYNAMIC = TensorSpec.parse("x:uint8:batch,3,height,width")

    @pytest.fixture
    def wide(self, tmp_path):
        put(tmp_path / "wide.png", pixels(12, 20))
        return tmp_path

    @pytest.mark.parametrize(
        ("options", "resized", "box"),
        [
            ({"resize": 6, "crop": 4}, (10, 6), (3, 1, 7, 5)),
            ({"resize": 6}, (10, 6), (2, 0, 8, 6)),
            ({"resize": (5, 7)}, (7, 5), None),
            ({"resize": (10, 14), "crop": (4, 6)}, (14, 10), (4, 3, 10, 7)),
            ({"crop": (4, 6)}, (20, 12), (7, 4, 13, 8)),
        ],
    )
    def test_resize_and_crop(self, wide, options, resized, box):
        image = Image.fromarray(pixels(12, 20)).resize(resized, Image.Resampling.BILINEAR)
        expected = np.asarray(image.crop(box) if box else image)
        assert np.array_equal(one(wide, self.DYNAMIC, **options).transpose(1, 2, 0), expected)

    def test_values(self, folder):
        made = one(folder, rescale=1 / 128, mean=(1, 0.5, 0), std=(2,))
        expected = (pixels().transpose(2, 0, 1) / 128 - np.array([1, 0.5, 0])[:, None, None]) / 2
        assert np.allclose(made, expected, atol=1e-6)
        (note,) = open_dataset(str(folder), (RGB,), options=DataOptions(mean=(1, 0.5, 0), std=(2,))).notes
        assert "mean 1 0.5 0, standard deviation 2 (mean, std as given" in note

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"crop": 4}, "the options make images of 4×4, and the model takes x:float32:batch,3,8,8"),
            ({"mean": (1, 2)}, r"the mean \[1.0, 2.0\] does not fit images of 3 channels"),
        ],
    )
    def test_refused(self, folder, options, said):
        with pytest.raises(DataError, match=said):
            one(folder, **options)

    @pytest.mark.parametrize("options", [{"std": (0.0,)}, {"resize": 0}, {"crop": (3, -1)}, {"rescale": 0}, {"x": 1}])
    def test_options_that_make_no_sense(self, options):
        with pytest.raises(ValueError, match="DataOptions"):
            DataOptions(**options)


# preprocessor_config.json as the image processors of Hugging Face write it
VIT = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
CLIP = {
    "size": {"shortest_edge": 10},
    "crop_size": {"height": 8, "width": 8},
    "resample": 3,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "do_center_crop": True,
}
OLD = {"size": 8, "do_resize": True, "do_normalize": False}
CONVNEXT = {**VIT, "size": {"shortest_edge": 8}, "crop_pct": 0.8}


class TestConfiguration:
    @pytest.mark.parametrize(
        ("processor", "config"),
        [
            ("ViTImageProcessor", VIT),
            ("CLIPImageProcessor", CLIP),
            ("ViTImageProcessor", OLD),
            ("ConvNextImageProcessor", CONVNEXT),
            ("DeiTImageProcessor", {**CLIP, "size": {"height": 11, "width": 11}}),
        ],
    )
    def test_does_what_transformers_does(self, tmp_path, processor, config):
        transformers = pytest.importorskip("transformers")
        put(tmp_path / "a.png", pixels(23, 31))
        configure(tmp_path, **config)
        theirs = getattr(transformers, f"{processor}Pil")(**config)(Image.open(tmp_path / "a.png"), return_tensors="np")
        assert np.allclose(one(tmp_path), theirs["pixel_values"][0], atol=1e-5)

    @pytest.mark.parametrize("beside", [False, True])
    def test_in_the_folder_or_beside_it(self, folder, beside):
        configure(folder.parent if beside else folder, image_mean=[0.5], image_std=[0.25])
        assert np.allclose(one(folder), (pixels().transpose(2, 0, 1) / 255 - 0.5) / 0.25, atol=1e-6)
        (note,) = open_dataset(str(folder), (RGB,)).notes
        assert "(from preprocessor_config.json)" in note

    def test_steps_that_are_turned_off(self, folder):
        configure(
            folder,
            do_resize=False,
            size=4,
            do_center_crop=False,
            crop_size=4,
            do_rescale=False,
            do_normalize=False,
            image_mean=[9.0],
        )
        assert np.array_equal(one(folder), pixels().transpose(2, 0, 1))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "Invalid JSON"),
            ('{"size": "large"}', "size"),
            ('{"size": {"longest_edge": 8}}', "shortest_edge, or height and width"),
            ('{"size": {"height": 4, "width": 4}}', "preprocessor_config.json makes images of 4×4, and the model take"),
            ('{"image_std": [1, 0, 1]}', r"the std \[1.0, 0.0, 1.0\] does not fit"),
        ],
    )
    def test_refused(self, folder, text, said):
        (folder / "preprocessor_config.json").write_text(text)
        with pytest.raises(DataError, match=said) as caught:
            open_dataset(str(folder), (RGB,))
        assert caught.value.remedy


def test_listing_is_of_the_folder_as_it_is(folder):
    found = listing(folder)
    assert [path.name for path in found.files] == [f"{index}.png" for index in range(5)]
    assert (found.labels, found.classes, found.folders) == (None, {}, (folder,))
