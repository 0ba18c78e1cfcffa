"""Trains models/weights/digits.safetensors: ``python -m enginesmith.models.train_digits``.

One fixed recipe with one fixed seed; the last weights are kept. Nothing is chosen by looking at the test split. The
same machine and torch release give the same bytes. One-cycle schedule: Smith and Topin, "Super-Convergence" (2019);
label smoothing: Szegedy et al., "Rethinking the Inception Architecture" (CVPR 2016).
"""

import logging
import math
import time

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.calibration.dataset import Split, embedded
from enginesmith.models.digits import WEIGHTS, Digits

EPOCHS = 120
BATCH = 60
SEED = 0

logger = logging.getLogger(__name__)


def train() -> nn.Module:
    """Train a network on the ``train`` split of the digits."""
    torch.manual_seed(SEED)
    data = embedded("digits", "train")
    assert data.labels is not None
    image, label = torch.from_numpy(data.batch(0, len(data))["image"]), torch.from_numpy(data.labels)
    module = Digits()
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.05)
    steps = EPOCHS * (len(image) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.2)
    for _ in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(image)), BATCH):
            loss = F.cross_entropy(module(jitter(image[rows])), label[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return module.eval()


def jitter(image: Tensor) -> Tensor:
    """Turn each image by up to 12°, scale it by up to 10 % and move it by up to one pixel, at random."""
    count, _, _, size = image.shape
    draw = torch.rand(4, count) * 2 - 1
    angle, zoom = draw[0] * math.radians(12), 1 + 0.1 * draw[1]
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    # Sampling coordinates run from −1 to 1 over the image, so a pixel is 2 / size wide.
    across, down = draw[2] * 2 / size, draw[3] * 2 / size
    matrix = torch.stack([cos, -sin, across, sin, cos, down], dim=1).view(count, 2, 3)
    grid = F.affine_grid(matrix, list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, align_corners=False)


@torch.no_grad()
def accuracy(module: nn.Module, split: Split) -> float:
    """Top-1 on a split, from 0 to 1."""
    data = embedded("digits", split)
    assert data.labels is not None
    guess = module(torch.from_numpy(data.batch(0, len(data))["image"])).argmax(1)
    return int((guess == torch.from_numpy(data.labels)).sum()) / len(data)


def main() -> None:
    """Train, write the weights, and log what they are worth."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    start = time.perf_counter()
    module = train()
    WEIGHTS.parent.mkdir(exist_ok=True)
    WEIGHTS.write_bytes(save(module.state_dict()))
    logger.info("trained in %.0f s", time.perf_counter() - start)
    logger.info("top-1: calibration %.4f, test %.4f", accuracy(module, "calibration"), accuracy(module, "test"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
