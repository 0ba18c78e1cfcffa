"""Options that keep one node in floating point, as they are named on the command line."""

import json
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.tasks.base import RECORDS
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT
from enginesmith.pipeline.tasks.prosecute import list_other_graphs


@pytest.mark.parametrize("name", ["MatMul_c", "/layers[0]/MatMul", "a*b?", "it's"])
def test_the_words_name_the_same_node_as_the_value(name: str, tmp_path: Path) -> None:
    record = tmp_path / RECORDS
    record.write_text(json.dumps([{"group": name, "precision": "int8"}]))
    assigned = Artifact(kind="record", path=record, sha256="", bytes=0)
    ((option, _),) = list_other_graphs(Transform(step=Precision(precision="int8")), {ASSIGNMENT: assigned}, [])
    flag, pattern = shlex.split(option.words)
    assert (flag, pattern) == ("--keep", option.value)
    assert fnmatchcase(name, pattern)
