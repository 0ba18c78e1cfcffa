"""Remedies that errors carry."""

import re
from pathlib import Path

from enginesmith.pipeline import errors


def test_a_remedy_names_distributions_and_no_extra_of_a_package_that_is_on_no_index() -> None:
    assert re.fullmatch(r"pip install 'transformers>=[\d.]+'", errors.install_command("transformers"))
    assert errors.install_command("torch", "--upgrade").startswith("pip install --upgrade 'torch>=")
    assert errors.install_command("gcsfs") == "pip install gcsfs"
    roots = [Path(errors.__file__).parents[1] / name for name in ("pipeline", "calibration", "models", "docs")]
    files = [path for root in roots for ends in ("*.py", "*.md") for path in root.rglob(ends)]
    assert len(files) > 100
    extra = re.compile(r"(?<!\./)enginesmith\[[a-z]")
    assert not [path for path in files if extra.search(path.read_text())]
