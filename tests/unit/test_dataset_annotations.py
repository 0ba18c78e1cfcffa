"""Images with masks or boxes: labels get the same geometry as the pixels, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from enginesmith.calibration.dataset import DataOptions, open_dataset
from enginesmith.calibration.describe import describe
from enginesmith.calibration.file_formats import check_readable
from enginesmith.calibration.sources import Request
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import TensorSpec

RAW = TensorSpec.parse("x:uint8:batch,3,16,16")
SUB_FOLDERS = (Path("images/city"), Path("masks/city"))
BOX = (8, 4, 16, 12)
"""Left, top, width and height in an image of 32×48."""
GEOMETRIES: list[dict[str, Any]] = [{}, {"resize": 32}, {"resize": (16, 16)}, {"resize": 12}, {"resize": 64}]


def save(path: Path, array: Any, orientation: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(array)).save(path, exif=exif)
    return path


TURNED = {6: np.rot90, 3: lambda upright: upright[::-1, ::-1]}
"""Stored forms of an upright image, by the orientation that turns each back: by 90° and by 180°."""


def scene() -> Any:
    """A black picture with a white box."""
    left, top, width, height = BOX
    made = np.zeros((32, 48, 3), np.uint8)
    made[top : top + height, left : left + width] = 255
    return made


def bounds(pixels: Any) -> list[int]:
    """Left, top, right and bottom of what is white."""
    rows, columns = np.nonzero(pixels)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


class TestMasks:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("b", "a"):
            save(tmp_path / "images" / f"{name}.jpg", np.zeros((32, 48, 3), np.uint8))
            save(tmp_path / "images" / f"{name}.jpg", scene())
            save(
                tmp_path / "masks" / f"{name}.png", (scene()[:, :, 0] > 0).astype(np.uint8) * (3 if name == "a" else 7)
            )
        return tmp_path

    def test_each_image_has_the_mask_of_its_name(self, folder: Path) -> None:
        data = open_dataset(str(folder), (RAW,), options=DataOptions(resize=(16, 16)))
        labels: Any = data.labels
        assert (labels.shape, labels.dtype) == ((2, 16, 16), np.uint8)
        assert [int(each.max()) for each in labels] == [3, 7]
        assert "labels from masks: 3 classes from 0 to 7" in data.notes

    @pytest.mark.parametrize("options", GEOMETRIES)
    def test_a_mask_lies_on_its_image(self, folder: Path, options: dict[str, Any]) -> None:
        data = open_dataset(str(folder), (RAW,), options=DataOptions(**options))
        labels: Any = data.labels
        white = np.asarray(data.arrays["x"][0])[0] > 127
        mask = labels[0] == 3
        assert (white != mask).sum() <= 0.1 * white.size
        assert np.abs(np.subtract(bounds(white), bounds(mask))).max() <= 1

    def test_outside_of_a_small_image_nothing_is_labeled(self, folder: Path) -> None:
        labels: Any = open_dataset(str(folder), (RAW,), options=DataOptions(resize=12)).labels
        assert set(np.unique(labels[0])) == {0, 3, 255}
        assert (labels[0, [0, 1, -2, -1]] == 255).all()

    def test_palettes_are_numbers_and_not_colors(self, folder: Path) -> None:
        for name in "ab":
            mask = Image.fromarray((scene()[:, :, 0] > 0).astype(np.uint8) * 2, "P")
            mask.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
            mask.save(folder / "masks" / f"{name}.png")
        labels: Any = open_dataset(str(folder), (RAW,)).labels
        assert set(np.unique(labels)) == {0, 2}

    def test_many_classes_fit(self, folder: Path) -> None:
        for name in "ab":
            save(folder / "masks" / f"{name}.png", (scene()[:, :, 0] > 0).astype(np.uint16) * 900)
        labels: Any = open_dataset(str(folder), (RAW,)).labels
        assert int(labels.max()) == 900

    @pytest.mark.parametrize("bits", [1, 8])
    def test_masks_of_two_numbers_have_two_classes(self, folder: Path, bits: int) -> None:
        white = scene()[:, :, 0] > 0
        for name in "ab":
            save(folder / "masks" / f"{name}.png", white if bits == 1 else white.astype(np.uint8) * 255)
        data = open_dataset(str(folder), (RAW,), options=DataOptions(resize=12))
        labels: Any = data.labels
        assert set(np.unique(labels)) == {0, 1, 255}
        assert (labels[:, [0, 1, -2, -1]] == 255).all(), "outside of the image"
        assert (labels[:, 2:-2] < 255).all()
        told = "labels from masks: 2 classes from 0 to 1"
        assert told + ("; pixels are 0 and 255 only, so 255 is class 1" if bits == 8 else "") in data.notes

    def test_beside_other_classes_255_does_not_count(self, folder: Path) -> None:
        save(folder / "masks" / "a.png", np.where(scene()[:, :, 0] > 0, 255, 0).astype(np.uint8))
        labels: Any = open_dataset(str(folder), (RAW,), options=DataOptions(resize=(16, 16))).labels
        assert set(np.unique(labels)) == {0, 7, 255}

    @pytest.mark.parametrize(
        ("path", "array", "message"),
        [
            ("masks/c.png", np.zeros((4, 4), np.uint8), "no other half, the first 'c'"),
            ("masks/a.png", np.zeros((4, 4), np.uint8), "a.jpg has 32×48 pixels, and its mask 4×4"),
            (
                "masks/a.png",
                scene() * np.uint8([1, 0, 0]),
                r"a\.png has 3 channels \(RGB\), expected one.*\n.*each color is a",
            ),
            ("masks/a.png", scene(), r"3 channels \(RGB\), expected one.*\n.*channel R alone has the same"),
            ("masks/a.png", scene()[..., :2], r"2 channels \(LA\), expected one.*\n.*channel L alone has the same"),
            ("images/a.png", np.zeros((32, 48), np.uint8), r"a\.jpg and a\.png in .*images have one name"),
            ("masks/a.tif", np.zeros((32, 48), np.uint8), r"a\.png and a\.tif in .*masks have one name"),
        ],
    )
    def test_what_is_no_mask_is_refused(self, folder: Path, path: str, array: Any, message: str) -> None:
        save(folder / path, array)
        with pytest.raises(DataError, match=message):
            open_dataset(str(folder), (RAW,))

    @pytest.mark.parametrize(
        ("numbers", "expected", "noted"),
        [((0, 255), {0, 1}, True), ((0, 1, 255), {0, 1, 255}, False), ((255,), {255}, False)],
    )
    def test_arrays_of_0_and_255_only_have_two_classes(
        self, tmp_path: Path, numbers: tuple[int, ...], expected: set[int], noted: bool
    ) -> None:
        """As in a folder of masks; pixels of 255 do not count beside others."""
        images, masks = np.ones((5, 3, 16, 16), np.uint8), np.resize(np.uint8(numbers), (5, 16, 16))
        np.savez(tmp_path / "data.npz", x=images, labels=masks)
        data = open_dataset(str(tmp_path / "data.npz"), (RAW,))
        labels: Any = data.labels
        assert set(np.unique(labels)) == expected
        assert any("255 is class 1" in note for note in data.notes) == noted

    def test_floating_point_numbers_are_no_classes(self, folder: Path) -> None:
        (folder / "masks" / "a.png").unlink()
        save(folder / "masks" / "a.tif", np.zeros((32, 48), np.float32))
        with pytest.raises(DataError, match=r"a\.tif has floating-point numbers"):
            open_dataset(str(folder), (RAW,))

    def test_sub_folders_are_read_and_paired(self, folder: Path) -> None:
        for kind, name in (("images", "city/a.jpg"), ("masks", "city/a.png")):
            save(folder / kind / name, scene() if kind == "images" else np.full((32, 48), 5, np.uint8))
        data = open_dataset(str(folder), (RAW,))
        labels: Any = data.labels
        assert [int(each.max()) for each in labels] == [3, 7, 5]
        assert {str(each.relative_to(folder)) for each in data.folders} == {"images", "masks", *map(str, SUB_FOLDERS)}
        (folder / "masks" / "city" / "a.png").rename(folder / "masks" / "city" / "b.png")
        with pytest.raises(DataError, match=r"2 of the images and masks in .* the first 'city/a'"):
            open_dataset(str(folder), (RAW,))

    def test_files_that_are_left_out_are_counted(self, folder: Path) -> None:
        (folder / "masks" / "a.xcf").touch()
        assert "1 (1 .xcf), such as masks/a.xcf" in open_dataset(str(folder), (RAW,)).notes[-1]

    def write_jpeg(self, folder: Path, mask: Any, quality: int) -> None:
        """Replace the masks by JPEG files that are turned by 180°."""
        exif = Image.Exif()
        exif[0x0112] = 3
        for name in "ab":
            (folder / "masks" / f"{name}.png").unlink()
            Image.fromarray(mask).save(folder / "masks" / f"{name}.jpg", quality=quality, exif=exif)

    @pytest.mark.parametrize("quality", [90, 100])
    def test_jpeg_changes_the_numbers_of_masks(self, folder: Path, quality: int) -> None:
        self.write_jpeg(folder, (scene()[:, :, 0] > 0).astype(np.uint8) * 250, quality)
        notes = open_dataset(str(folder), (RAW,)).notes
        assert any(note.startswith("2 of 2 masks are JPEG files") for note in notes) == (quality == 90)

    def test_masks_whose_numbers_jpeg_made_are_refused(self, folder: Path) -> None:
        rows, columns = np.mgrid[:32, :48]
        self.write_jpeg(folder, ((rows - 15) ** 2 + (columns - 21) ** 2 < 100).astype(np.uint8) * 255, 5)
        with pytest.raises(DataError, match=r"2 of 2 masks are JPEG files.*of \d\d classes, \d\d have.*\n.*as PNG"):
            open_dataset(str(folder), (RAW,))

    @pytest.mark.parametrize("orientation", TURNED)
    @pytest.mark.parametrize("drawn", ["turned", "with the tag", "as stored"])
    def test_masks_lie_on_images_that_are_turned(self, folder: Path, orientation: int, drawn: str) -> None:
        """A mask of the stored pixels is known by its size; of images turned by 180° it is not."""
        turn = TURNED[orientation]
        for name in "ab":
            save(folder / "images" / f"{name}.png", turn(scene()), orientation)
            (folder / "images" / f"{name}.jpg").unlink()
            mask = (scene()[:, :, 0] > 0).astype(np.uint8) * 3
            tag = orientation if drawn == "with the tag" else None
            save(folder / "masks" / f"{name}.png", mask if drawn == "turned" else turn(mask), tag)
        data = open_dataset(str(folder), (RAW,), options=DataOptions(resize=(16, 16)))
        labels: Any = data.labels
        white = np.asarray(data.arrays["x"][0])[0] > 127
        unsure = orientation == 3 and drawn != "with the tag"
        if not (unsure and drawn == "as stored"):
            assert (white != (labels[0] == 3)).sum() <= 0.1 * white.size
        kept = orientation == 6 and drawn == "as stored"
        assert any(note.startswith("images turned by their EXIF orientation: 2 of 2") for note in data.notes) != kept
        assert any("as their masks are of the size that is stored: 2 of 2" in note for note in data.notes) == kept
        assert any("no size tells whether their masks" in note for note in data.notes) == unsure

    def test_masks_that_label_nothing_are_refused(self, folder: Path) -> None:
        for name in "ab":
            save(folder / "masks" / f"{name}.png", np.full((32, 48), 255, np.uint8))
        with pytest.raises(DataError, match="label nothing"):
            open_dataset(str(folder), (RAW,))

    def test_a_lacking_mask_is_told_before_anything_is_read(self, folder: Path) -> None:
        (folder / "masks" / "a.png").unlink()
        with pytest.raises(DataError, match="put a file of this name into masks"):
            check_readable(str(folder), Request((RAW,)))


class TestBoxes:
    def write(self, folder: Path, **changes: Any) -> str:
        """Two images in ``images``, the first with two boxes and a crowd."""
        for name in ("one.png", "two.png"):
            save(folder / "images" / name, scene())
        annotations = [
            {"id": 1, "image_id": 7, "category_id": 18, "bbox": list(BOX)},
            {"id": 2, "image_id": 7, "category_id": 3, "bbox": [0, 0, 48, 32]},
            {"id": 3, "image_id": 7, "category_id": 3, "bbox": [0, 0, 4, 4], "iscrowd": 1},
        ]
        found = {
            "images": [{"id": 7, "file_name": "one.png", "height": 32, "width": 48}, {"id": 5, "file_name": "two.png"}],
            "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}],
            "annotations": annotations,
            **changes,
        }
        (folder / "boxes.json").write_text(json.dumps(found))
        return str(folder / "boxes.json")

    def test_boxes_have_classes_in_the_order_of_ids(self, tmp_path: Path) -> None:
        data = open_dataset(self.write(tmp_path), (RAW,), options=DataOptions(resize=(16, 16)))
        labels: Any = data.labels
        assert labels.shape == (2, 3, 5)
        assert labels[0, :, 0].tolist() == [1, 0, -2]
        np.testing.assert_allclose(labels[0, 1, 1:], [0, 0, 16, 16])
        assert (labels[1] == -1).all()
        assert "labels: 3 boxes of 2 categories, numbered in order of their ids" in data.notes
        assert "crowds among these boxes, in which detections are not judged: 1" in data.notes

    @pytest.mark.parametrize("options", GEOMETRIES)
    def test_a_box_lies_around_its_pixels(self, tmp_path: Path, options: dict[str, Any]) -> None:
        data = open_dataset(self.write(tmp_path), (RAW,), options=DataOptions(**options))
        labels: Any = data.labels
        white = bounds(np.asarray(data.arrays["x"][0])[0] > 127)
        (box,) = (each for each in labels[0] if each[0] == 1)
        assert np.abs(np.subtract(white, box[1:])).max() <= 1

    def test_what_the_crop_cuts_off_is_left_out(self, tmp_path: Path) -> None:
        edge = [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [0, 0, 4, 4]}]
        path = self.write(tmp_path, annotations=edge)
        data = open_dataset(path, (RAW,), options=DataOptions(resize=16))
        labels: Any = data.labels
        assert labels.shape == (2, 1, 5)
        assert (labels == -1).all()
        assert data.notes[2:] == ("boxes outside of the crop: 1 of 1, left out",)

    def test_only_what_a_crop_cuts_is_cut(self, tmp_path: Path) -> None:
        """Boxes that reach past the edge of an image have all of their area, as pycocotools judges them."""
        given = [[-6, -2, 60, 36], [-30, 0, 20, 8]]
        annotations = [{"id": each, "image_id": 7, "category_id": 3, "bbox": box} for each, box in enumerate(given)]
        path = self.write(tmp_path, annotations=annotations)
        data = open_dataset(path, (RAW,), options=DataOptions(resize=(16, 16)))
        labels: Any = data.labels
        np.testing.assert_allclose(labels[0, :, 1:], [[-2, -1, 18, 17], [-10, 0, -10 / 3, 4]], atol=1e-5)
        assert data.notes[2:] == ("boxes outside of their image, which count: 1 of 2",)
        data = open_dataset(path, (RAW,), options=DataOptions(resize=16))  # the width alone is cut, from 24
        labels = data.labels
        np.testing.assert_allclose(labels[0, :, 1:], [[0, -1, 16, 17]])
        assert data.notes[2:] == ("boxes outside of the crop: 1 of 2, left out",)

    @pytest.mark.parametrize("orientation", TURNED)
    @pytest.mark.parametrize("stated", ["turned", "as stored", "nothing"])
    def test_boxes_lie_on_images_that_are_turned(self, tmp_path: Path, orientation: int, stated: str) -> None:
        """Boxes are of the size that the file states; where it states none, of the upright image."""
        turn = TURNED[orientation]
        stored: Any = turn(scene())
        boxes_of = stored if stated == "as stored" and orientation == 6 else scene()
        left, top, right, bottom = map(int, bounds(boxes_of[:, :, 0]))
        size = dict(zip(("height", "width"), boxes_of.shape, strict=False)) if stated != "nothing" else {}
        path = self.write(
            tmp_path,
            images=[{"id": 7, "file_name": "one.png", **size}],
            annotations=[{"id": 1, "image_id": 7, "category_id": 3, "bbox": [left, top, right - left, bottom - top]}],
        )
        save(tmp_path / "images" / "one.png", stored, orientation)
        data = open_dataset(path, (RAW,), options=DataOptions(resize=(16, 16)))
        labels: Any = data.labels
        white = bounds(np.asarray(data.arrays["x"][0])[0] > 127)
        assert np.abs(np.subtract(white, labels[0, 0, 1:])).max() <= 1
        kept, unsure = boxes_of is stored, orientation == 3 or stated == "nothing"
        assert any(note.startswith("images turned by their EXIF orientation: 1 of 1") for note in data.notes) != kept
        assert any("as their boxes are of the size that is stored: 1 of 1" in note for note in data.notes) == kept
        assert any("no size tells whether their boxes" in note for note in data.notes) == unsure

    @pytest.mark.parametrize("flat", [[8, 4, -5, 3], [8, 4, 3, 0]])
    def test_boxes_without_an_area_are_left_out_and_noted(self, tmp_path: Path, flat: list[int]) -> None:
        given = [{"id": each, "image_id": 7, "category_id": 3, "bbox": flat if each else BOX} for each in range(2)]
        data = open_dataset(self.write(tmp_path, annotations=given), (RAW,))
        assert data.notes[2:] == ("boxes without an area: 1 of 2, left out",)

    def test_images_may_lie_beside_the_file_or_above(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        (tmp_path / "images" / "one.png").rename(tmp_path / "one.png")
        assert len(open_dataset(path, (RAW,))) == 2
        (tmp_path / "annotations").mkdir()
        moved = (tmp_path / "boxes.json").rename(tmp_path / "annotations" / "boxes.json")
        (tmp_path / "images" / "two.png").rename(tmp_path / "two.png")
        assert len(open_dataset(str(moved), (RAW,))) == 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"categories": None}, "no list 'categories'"),
            ({"images": []}, "names no images"),
            ({"images": [{"id": 1, "file_name": "gone.png"}]}, "names the image 'gone.png'"),
            (
                {"images": [{"id": 7, "file_name": "one.png", "height": 48, "width": 32}]},
                "one.png has 48×32 pixels, and it has 32×48\n.*that the boxes were drawn in",
            ),
            ({"images": [{"id": 1, "file_name": "one.png"}, {"id": 1, "file_name": "two.png"}]}, "an id to several"),
            ({"categories": [{"name": "car"}]}, "categories without an id"),
            (
                {"annotations": [{"id": 9, "image_id": 7, "category_id": 3, "bbox": [0, 0, 1]}]},
                r"annotation 9 has the bbox \[0, 0, 1\]",
            ),
            ({"annotations": [{"id": 9, "image_id": 1, "category_id": 3, "bbox": [0, 0, 1, 1]}]}, "annotation 9 names"),
        ],
    )
    def test_what_is_no_file_of_boxes_is_refused(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            open_dataset(self.write(tmp_path, **changes), (RAW,))

    def test_text_that_is_no_json_is_refused_before_anything_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "boxes.json").write_text("{")
        with pytest.raises(DataError, match="is not JSON"):
            check_readable(str(tmp_path / "boxes.json"), Request((RAW,)))


def test_sets_with_annotations_are_described(tmp_path: Path) -> None:
    boxes = describe(TestBoxes().write(tmp_path))
    assert (boxes["kind"], boxes["samples"]) == ("data set: images and boxes (COCO)", 2)
    assert boxes["boxes"] == ["car: 2", "dog: 1"]
    for name in ("one", "two"):
        save(tmp_path / "masks" / f"{name}.png", np.zeros((32, 48), np.uint8))
    masks = describe(str(tmp_path))
    assert (masks["kind"], masks["samples"]) == ("data set: images and masks", 2)
    assert masks["labels"] == "a mask for each image"
