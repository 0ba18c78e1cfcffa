"""Remember what earlier runs found out, so that the next one tries first what worked.

    ROOT/FOLDER/NAME.json     the latest records of one kind, newest first

It decides the order of work alone, so that a file may be lost. Of two runs that end at the same moment one may not be
remembered.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.artifact import write_whole
from enginesmith.pipeline.errors import StoreError, storage_errors
from enginesmith.pipeline.store.manifest import PastFolder
from enginesmith.pipeline.store.remote import SharedStore

_MOST = 64
"""Records that a file has; the oldest are forgotten."""


class PastRecord(BaseModel, frozen=True):
    """Record a finding of one run."""

    def replaces(self, other: Any) -> bool:
        """Tell whether another record says nothing more beside this one."""
        return bool(self == other)


R = TypeVar("R", bound=PastRecord)


class PastRecords(Generic[R]):
    """The records of one file, in a folder of this machine or in a shared store."""

    def __init__(
        self, root: Path, folder: PastFolder, name: str, kind: type[R], shared: SharedStore | None = None
    ) -> None:
        self._folder, self._place, self._kind = folder, f"{folder}/{name}.json", kind
        self._root, self._shared = root, shared

    def read(self, note: Callable[[str], object] = lambda text: None) -> tuple[R, ...]:
        """Read the records, newest first; none where the file is missing, or the shared store is away.

        Those that are damaged, or that another version wrote, are left out; ``note`` takes a sentence about them.
        """
        try:
            content = self._shared.read(self._place) if self._shared else (self._root / self._place).read_bytes()
        except (OSError, StoreError):
            return ()
        if not content:
            return ()
        try:
            entries = json.loads(content)[self._folder]
            records = [self._parse(entry) for entry in entries]
        except (ValueError, KeyError, TypeError):
            note(f"{self._place} in the store is damaged, and ignored: this run begins in the usual order")
            return ()
        if left := records.count(None):
            note(f"{self._place} in the store: {left} of {len(records)} records cannot be read, and are ignored")
        return tuple(record for record in records if record is not None)

    def add(self, record: R) -> None:
        """Put a record before the others, and in the place of those that it replaces.

        Raises:
            StoreError: the store cannot be written.
        """
        before = self.read()
        if record in before:
            return
        records = [record, *(other for other in before if not record.replaces(other))][:_MOST]
        content = json.dumps({self._folder: [each.model_dump(mode="json") for each in records]}).encode()
        if self._shared:
            self._shared.write(self._place, content)
            return
        with storage_errors(f"the store {self._root}", store=self._root):
            write_whole(self._root / self._place, content)

    def _parse(self, entry: object) -> R | None:
        try:
            return self._kind.model_validate(entry)
        except ValidationError:
            return None
