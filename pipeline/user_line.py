"""Which line of the user's code something happened in: frames of the interpreter, without those of libraries."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_OWN = str(Path(__file__).parent)
_NEVER = ("torch", "torch_pruning")
"""Libraries whose lines nobody can change to make a model right."""


def raised_at(error: BaseException) -> str:
    """``net.py:12``, the innermost line of the user's that an exception came through; nothing where there is none."""
    return _named(traceback.extract_tb(error.__traceback__))


def called_at() -> str:
    """``net.py:12``, the innermost line of the user's that is running; nothing where there is none."""
    return _named(traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), lookup_lines=False)[::-1])


def users(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that are in no library, in no part of Python, and not in this package's pipeline."""
    others = (f"{_OWN}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}", "<")
    return [one for one in frames if "site-packages" not in one.filename and not one.filename.startswith(others)]


def _named(frames: Sequence[traceback.FrameSummary]) -> str:
    """The file's name and line; of a model that a library holds, that library's."""
    found = users(frames) or [one for one in frames if _is_of_a_model(one.filename)]
    return f"{Path(found[-1].filename).name}:{found[-1].lineno}" if found else ""


def _is_of_a_model(filename: str) -> bool:
    parts = Path(filename).parts
    return "site-packages" in parts and parts[parts.index("site-packages") + 1] not in _NEVER
