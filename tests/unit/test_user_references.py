"""References to functions of the user's code are checked before anything runs."""

from pathlib import Path

import pytest

from enginesmith.calibration.user_code import check_reference
from enginesmith.pipeline.errors import DataError, UsageError
from enginesmith.pipeline.recipe import make

CODE = """
import math
raise RuntimeError("this ran")
try:
    def loss(student, teacher, batch): return 0
except ImportError:
    from other import loss
def zoom(): return 1
class Metrics:
    def top1(self): return print
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_code.py").write_text(CODE)
    (tmp_path / "own_stars.py").write_text("from os.path import *\n")
    (tmp_path / "own_broken.py").write_text("def (:\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "inner.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("own_code.py:loss", "own_code:loss", "own_code:Metrics.top1", "own_package.inner:loss", "own_stars:whatever"),
        *("os.path:join", "math:sqrt", "torch.nn.functional:mse_loss"),
    ],
)
def test_what_is_there_or_cannot_be_known_is_let_through_and_not_run(name: str) -> None:
    check_reference(name, "loss")


@pytest.mark.parametrize(
    ("name", "said", "remedy"),
    [
        ("own_code.py:los", "own_code.py has no function 'los'", "did you mean own_code.py:loss?"),
        ("own_code.py:f2", "own_code.py has no function 'f2'", "module:function; own_code.py has zoom"),
        ("own_package.inner:print", "own_package.inner has no function 'print'", "give the loss as module:function"),
        ("own_cod.py:loss", "there is no file own_cod.py", "check the path"),
        ("own_cod:loss", "there is no module 'own_cod'", "give the loss as module:function or file.py:function"),
        ("own_code.inner:loss", "there is no module 'own_code.inner'", "give the loss as module:function"),
        ("own_broken:loss", "invalid syntax", "fix it"),
    ],
)
def test_what_is_not_there_is_said(name: str, said: str, remedy: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        check_reference(name, "loss")
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "values",
    [
        {"metric": "own_code.py:nothing"},
        {"prune": ["0.3"], "recover": True, "recovery": {"method": "own_code:nothing"}},
    ],
)
def test_a_recipe_is_refused_before_anything_is_done(values: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="has no function 'nothing'"):
        make({"model": "digits", **values})
