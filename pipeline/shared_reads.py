"""What steps read of the user's files, as machines tell each other: a small file for each name, with all lists in it.

So one request finds them, or that there are none. Of two machines that add lists to one file at the same moment one may
lose its own; whoever needs that does the step once more, and adds it again.
"""

import contextlib
import json
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from enginesmith.pipeline.errors import StoreError
from enginesmith.pipeline.shared_store import SharedStore
from enginesmith.pipeline.stored_entry import DAY_SECONDS

MOST_CANDIDATES = 16
"""Of one name; the oldest are forgotten."""


class _File(BaseModel):
    """What lies under a name."""

    model_config = ConfigDict(frozen=True)

    used: float = 0.0
    """Seconds since the epoch; noted once a day."""
    candidates: tuple[Any, ...] = ()
    """The newest first."""


def candidates(store: SharedStore, name: str) -> tuple[Any, ...]:
    """What was published under a name, the newest first; it counts as used.

    Raises:
        StoreError: the service refuses it, or was away for too long.
    """
    found = _read(store, name)
    if found.candidates and found.used < time.time() - DAY_SECONDS:
        with contextlib.suppress(StoreError):  # who may only read leaves no trace
            _write(store, name, found.candidates)
    return found.candidates


def publish(store: SharedStore, name: str, content: bytes) -> None:
    """Put what a step read before what others read.

    Raises:
        StoreError: the service refuses it, or was away for too long.
    """
    newest, found = json.loads(content), _read(store, name).candidates
    if newest not in found[:1]:
        _write(store, name, (newest, *(one for one in found if one != newest))[:MOST_CANDIDATES])


def remove_unused(store: SharedStore, max_age_seconds: float) -> None:
    """Remove what was not looked up for so long."""
    oldest = time.time() - max_age_seconds
    old = [path for path, info in store.files("reads").items() if store.modified(info) < oldest]
    store.delete(f"{store.root}/reads/{path}" for path in old)


def _read(store: SharedStore, name: str) -> _File:
    with contextlib.suppress(ValidationError):
        if (content := store.read(_place(name))) is not None:
            return _File.model_validate_json(content)
    return _File()


def _write(store: SharedStore, name: str, all_: tuple[Any, ...]) -> None:
    store.write(_place(name), _File(used=time.time(), candidates=all_).model_dump_json().encode())


def _place(name: str) -> str:
    return f"reads/{name}.json"
