"""Everything that one network is judged with, in a folder: itself, its weights, data to calibrate, choose and judge.

FOLDER/networks.py:NAME and FOLDER/metrics.py are copies of the files here. FOLDER/NAME/calibration.npz has inputs
alone; evaluation.npz and judgement.npz have labels too, and are of other digits or texts than those that the network
was trained and calibrated on. A precision is chosen by looking at ``evaluation``; no one looks at ``judgement`` before
the end. What is there already is left alone.
"""

import importlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save_file
from torch import Tensor, nn

from . import networks, texts
from .pictures import Pictures, pages, pictures, restore
from .training import SEED, Phase, boxes, classes, linear_head, masks, pixels, rows, strokes, train, values

HERE = Path(__file__).parent
FILES = (
    "networks.py",
    "squeezed.py",
    "shuffled.py",
    "attention.py",
    "dense.py",
    "harden.py",
    "halves.py",
    "metrics.py",
)
"""What lies beside the weights."""
CALIBRATION, EVALUATION, JUDGEMENT = "calibration", "evaluation", "judgement"
CALIBRATION_ROWS, JUDGED_ROWS, JUDGED_TEXTS = 256, 2000, 600
_TRAINING_TEXTS = 2000
_TEST_DIGITS = 357

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Task:
    """Describe how a network is trained, its inputs and labels, and how its answers are judged."""

    build: Callable[[], nn.Module]
    data: Callable[[str], Arrays]
    """Part → its arrays by name, labels among them."""
    metric: str = "top1"
    dynamic: bool = False
    """Whether weights alone are commonly quantized ahead of time in such a network."""


@dataclass(frozen=True)
class Case:
    """A network's files."""

    name: str
    folder: Path

    @property
    def source(self) -> str:
        """Name the model for the command line's MODEL."""
        return f"{self.folder.parent / 'networks.py'}:{self.name}"

    @property
    def metric(self) -> str:
        """Name the metric for the command line's METRIC."""
        name = TASKS[self.name].metric
        return name if name == "top1" else f"{self.folder.parent / 'metrics.py'}:{name}"

    def data(self, part: str) -> Path:
        """The arrays of a part."""
        return self.folder / f"{part}.npz"


def prepare(name: str, work: Path) -> Case:
    """Train the network and write its data, unless that is done."""
    case = Case(name, work / name)
    case.folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        if not (work / file).is_file() or (work / file).read_bytes() != (HERE / file).read_bytes():
            shutil.copyfile(HERE / file, work / file)
    if str(work) not in sys.path:
        sys.path.insert(0, str(work))  # files of networks import each other beside their weights
    weights = work / f"{name}.safetensors"
    if not weights.is_file():
        start = time.perf_counter()
        torch.manual_seed(SEED)
        torch.set_num_threads(1)  # the sums of two threads differ from those of three
        network = TASKS[name].build()
        save_file(network.state_dict(), weights)
        print(f"{name}: weights in {time.perf_counter() - start:.0f} s", flush=True)
    for part in (CALIBRATION, EVALUATION, JUDGEMENT):
        if not case.data(part).is_file():
            np.savez(case.data(part), **_arrays(case, part, weights))
    return case


def _arrays(case: Case, part: str, weights: Path) -> dict[str, NDArray[Any]]:
    arrays = dict(TASKS[case.name].data(part))
    if part == CALIBRATION:
        del arrays["labels"]
    elif TASKS[case.name].metric == "cosine":
        arrays["labels"] = _embeddings(arrays, weights)
    return arrays


def _seen(part: str, size: int) -> Pictures:
    """Pictures of digits that only this part has."""
    if part == CALIBRATION:
        return pictures("calibration", CALIBRATION_ROWS, size, SEED)
    half = _TEST_DIGITS // 2
    digits = slice(None, half) if part == EVALUATION else slice(half, None)
    return pictures("test", JUDGED_ROWS, size, SEED + (1 if part == EVALUATION else 2), digits)


def _classified(part: str) -> Arrays:
    data = _seen(part, networks.SIZE)
    return {"image": data.image.numpy(), "labels": data.label.numpy()}


def _read(part: str) -> Arrays:
    data = _seen(part, networks.SIZE)
    return {"rows": strokes(data.image, data.ink).numpy(), "labels": data.label.numpy()}


def _gauged(part: str) -> Arrays:
    data = _seen(part, networks.SIZE)
    return {"image": data.image.numpy(), "labels": networks.VALUES[data.label].numpy()}


def _paged(part: str) -> Arrays:
    data = _seen(part, networks.PAGE_SIZE // 2)
    found = pages(data.image, data.ink, data.label, np.random.default_rng(SEED))
    found.digits[..., 1:] *= networks.PAGE_PIXELS
    return {"image": found.image.numpy(), "labels": found.digits.numpy()}


def _enlarged(part: str) -> Arrays:
    large = restore(_seen(part, 2 * networks.SIZE).image)[: JUDGED_ROWS // 4]
    return {"image": torch.nn.functional.avg_pool2d(large, 2).numpy(), "labels": large.numpy()}


def _segmented(part: str) -> Arrays:
    data = _seen(part, networks.SEGMENTED_SIZE)
    few = JUDGED_ROWS // 4
    return {"image": data.image[:few].numpy(), "labels": data.mask[:few].numpy().astype(np.uint8)}


def _texts(part: str) -> Arrays:
    """Rows that follow each other: texts are in no order."""
    firsts = {CALIBRATION: _TRAINING_TEXTS, EVALUATION: _TRAINING_TEXTS + CALIBRATION_ROWS}
    first = firsts.get(part, _TRAINING_TEXTS + CALIBRATION_ROWS + JUDGED_TEXTS)
    count = CALIBRATION_ROWS if part == CALIBRATION else JUDGED_TEXTS
    chosen = texts.texts()[first : first + count]
    return {**chosen.feeds, "labels": chosen.label}


def _encoder() -> networks.Encoder:
    encoder = networks.Encoder()
    # The pooling layer is left out, which sentence embeddings do without, and a table of positions.
    weights = load(texts.read("model.safetensors"))
    wanted = {key: value for key, value in weights.items() if key in encoder.bert.state_dict()}
    encoder.bert.load_state_dict(wanted)
    return encoder.eval()


def _text_classifier() -> nn.Module:
    classifier = networks.TextClassifier()
    classifier.encoder = _encoder()
    training = texts.texts()[:_TRAINING_TEXTS]
    vectors = _encoded(classifier.encoder, training.feeds)
    linear_head(vectors, torch.from_numpy(training.label), classifier.fc)
    return classifier


def _embeddings(feeds: Arrays, weights: Path) -> NDArray[Any]:
    """Answer with the encoder alone."""
    encoder = networks.Encoder()
    encoder.load_state_dict(load(weights.read_bytes()))
    return _encoded(encoder.eval(), {name: feeds[name] for name in ("input_ids", "attention_mask")}).numpy()


@torch.no_grad()
def _encoded(encoder: nn.Module, feeds: Arrays) -> Tensor:
    batches = zip(*(torch.from_numpy(array).split(32) for array in feeds.values()), strict=True)
    return torch.cat([encoder(*batch) for batch in batches])


def _build(name: str) -> nn.Module:
    """Build a network of one of the files beside the weights."""
    module, _, builder = name.partition(".")
    network: nn.Module = getattr(importlib.import_module(module), builder)()
    return network


_MOBILE_PHASES = (Phase(8192, 16, 4e-3), Phase(10240, 32, 6e-3))
TASKS: Mapping[str, Task] = {
    "resnet20": Task(
        lambda: train(networks.SmallResNet(3), classes, (Phase(16384, 16, 8e-3), Phase(16384, 32, 8e-3))), _classified
    ),
    "resnet56": Task(
        lambda: train(networks.SmallResNet(9), classes, (Phase(8192, 16, 6e-3), Phase(12288, 32, 8e-3))), _classified
    ),
    "mobilenet": Task(
        lambda: train(networks.SmallMobileNet(), classes, (Phase(8192, 16, 4e-3), Phase(10240, 32, 6e-3))), _classified
    ),
    "unet": Task(
        lambda: train(networks.SmallUNet(), masks, (Phase(4096, 32, 4e-3), Phase(4096, 64, 4e-3))),
        _segmented,
        "overlap",
    ),
    "lstm": Task(lambda: train(networks.Sequence(), rows, (Phase(20480, 32, 3e-3),)), _read, dynamic=True),
    "gru": Task(lambda: train(networks.Gated(), rows, (Phase(20480, 32, 3e-3),)), _read, dynamic=True),
    "mobilenet_v3": Task(lambda: train(_build("squeezed.build_mobilenet_v3"), classes, _MOBILE_PHASES), _classified),
    "efficientnet": Task(lambda: train(_build("squeezed.build_efficientnet"), classes, _MOBILE_PHASES), _classified),
    "shufflenet": Task(lambda: train(_build("shuffled.ShuffleNet"), classes, _MOBILE_PHASES), _classified),
    "vit": Task(lambda: train(_build("attention.VisionTransformer"), classes, (Phase(20480, 32, 1e-3),)), _classified),
    "swin": Task(lambda: train(_build("attention.WindowTransformer"), classes, (Phase(20480, 32, 1e-3),)), _classified),
    "detector": Task(
        lambda: train(_build("dense.Detector"), boxes, (Phase(81920, 32, 3e-3),)), _paged, "mean_precision"
    ),
    "upscaler": Task(lambda: train(_build("dense.Upscaler"), pixels, (Phase(4096, 64, 1e-3),)), _enlarged, "psnr"),
    "gauge": Task(
        lambda: train(_build("dense.Gauge"), values, (Phase(8192, 16, 6e-3), Phase(12288, 32, 8e-3))),
        _gauged,
        "closeness",
    ),
    "minilm": Task(_text_classifier, _texts, dynamic=True),
    "minilm_embedding": Task(_encoder, _texts, "cosine", dynamic=True),
}
