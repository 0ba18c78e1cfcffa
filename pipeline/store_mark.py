"""What says of a place that it is a store: a file at its root, which a new store begins with."""

import contextlib
import json
import threading
import time
from collections.abc import Callable

from enginesmith.pipeline.errors import StoreError, UsageError

_FILE, _SCHEMA = "enginesmith-store.json", "enginesmith.store/1"


class StoreMarker:
    """The file of one store; seen once, it is not asked for again."""

    def __init__(
        self, place: str, has_folders: bool, read: Callable[[str], bytes], write: Callable[[str, bytes], None]
    ) -> None:
        """``place`` is for messages; ``read`` and ``write`` take a path below the root."""
        self._place, self._has_folders, self._read, self._write = place, has_folders, read, write
        self._known = False
        self._failed: tuple[float, StoreError] | None = None
        """When the service could not be asked, and why."""
        self._lock = threading.Lock()

    def ensure_exists(self) -> None:
        """Before anything else: that this is a store, which a new one is made to be.

        Raises:
            UsageError: the bucket is not there, or the folder cannot be.
            StoreError: it is a store of another version; the service refuses it, or was away for too long.
        """
        if self._known:
            return
        began = time.monotonic()
        with self._lock:
            if self._known:
                return
            if self._failed is not None and self._failed[0] > began:  # while this thread waited for the other one
                raise self._failed[1]
            try:
                self._read_or_create()
            except StoreError as error:
                self._failed = time.monotonic(), error
                raise
            self._known = True

    def validate_exists(self) -> None:
        """Insist that there is a store already, which looking after it is not to make.

        Raises:
            UsageError: there is none.
        """
        try:
            self._validate_schema(self._read(_FILE))
        except FileNotFoundError as error:
            raise UsageError(f"{self._place}: there is no store", "check the address") from error

    def _read_or_create(self) -> None:
        try:
            try:
                self._validate_schema(self._read(_FILE))
            except FileNotFoundError:
                self._write(_FILE, json.dumps({"schema": _SCHEMA}).encode() + b"\n")
        except FileNotFoundError as error:
            if self._has_folders:
                raise UsageError(
                    f"{self._place}: no folder can be made there ({error})", "name one that can be written to"
                ) from error
            raise UsageError(
                f"{self._place}: there is no such bucket ({error})", "check the address, or make the bucket"
            ) from error

    def _validate_schema(self, content: bytes) -> None:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found = json.loads(content)["schema"]
            if found != _SCHEMA:
                raise StoreError(
                    f"{self._place} is of another version of enginesmith: {found!r} instead of {_SCHEMA!r}",
                    "use another folder of the bucket, or the same version everywhere",
                )
