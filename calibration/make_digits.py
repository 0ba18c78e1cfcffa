"""Write calibration/data/digits.npz from scikit-learn's copy: ``python -m enginesmith.calibration.make_digits``."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SIZES = {"train": 1200, "calibration": 240, "test": 357}
SEED = 0
FILE = Path(__file__).parent / "data" / "digits.npz"


def main() -> None:
    """Cut 1 797 images into three stratified splits, each in the order of the source."""
    images, labels = load_digits(return_X_y=True)
    rest = np.arange(len(labels))
    arrays = {}
    for name, size in SIZES.items():
        rows = rest
        if size < len(rest):
            rows, rest = train_test_split(rest, train_size=size, stratify=labels[rest], random_state=SEED)
        rows = np.sort(rows)
        arrays[f"{name}_images"] = images[rows].reshape(-1, 8, 8).astype(np.uint8)
        arrays[f"{name}_labels"] = labels[rows].astype(np.uint8)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
