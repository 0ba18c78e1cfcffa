"""A bundle: what is loaded, a manifest, a test vector and a script that runs it with the engine's own package alone."""

import shutil
from pathlib import Path

from enginesmith.pipeline.packaging import manifest as manifests
from enginesmith.pipeline.packaging.choice import Chosen
from enginesmith.pipeline.packaging.description import describe

_SCRIPTS = {"onnxruntime": "infer_onnxruntime.py", "tensorrt": "infer_tensorrt.py", "tensorrt_rtx": "infer_tensorrt.py"}


def write(chosen: Chosen, folder: Path) -> None:
    """Write a bundle into an empty folder."""
    for name, source in chosen.files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    assert chosen.record.test_vector is not None
    shutil.copyfile(chosen.folder / chosen.record.test_vector.path, folder / manifests.VECTOR)
    script = Path(__file__).with_name(_SCRIPTS[chosen.record.engine])
    shutil.copyfile(script, folder / manifests.INFER)
    found = describe(chosen, "bundle", chosen.main.name, manifests.files_of(folder))
    (folder / manifests.FILE).write_text(found.text())
