"""An object store in memory that shows writes late, loses connections, and keeps what it said it refused."""

import errno
import time
import zlib
from pathlib import Path
from typing import Any, ClassVar

from fsspec.spec import AbstractFileSystem

import faults


class LyingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Objects in memory; what was written is seen later, and listed later than that."""

    protocol = "lying"
    objects: ClassVar[dict[str, list[tuple[int, float, bytes | None]]]] = {}
    """By path, the versions: the operation that wrote it, the time, and the bytes, or None for a deletion."""
    now, lag = 0, 0

    def _see(self, path: str, lag: int) -> tuple[float, bytes] | None:
        late = zlib.crc32(path.encode()) % (lag + 1)  # a manifest may be seen before its files
        seen = [one for one in self.objects.get(path, []) if one[0] + late <= type(self).now]
        return (seen[-1][1], seen[-1][2]) if seen and seen[-1][2] is not None else None

    def _meet(self) -> None:
        faults.current.call()
        if faults.current.is_due("lost"):
            raise ConnectionResetError(errno.ECONNRESET, "connection lost")
        if faults.current.is_due("refused"):
            raise PermissionError(errno.EACCES, "refused")

    def _put(self, path: str, content: bytes | None) -> None:
        self._meet()
        half = faults.current.is_due("half", "half-kill")
        whole = content if content is None or not half else content[: len(content) // 2]
        self.objects.setdefault(path, []).append((type(self).now, time.time(), whole))
        if half and faults.current.kind == "half-kill":
            faults.current.dead = True
            raise faults.Killed
        if half or faults.current.is_due("stored"):
            raise ConnectionResetError(errno.ECONNRESET, "connection lost")

    def cat_file(self, path: str, **rest: Any) -> bytes:
        self._meet()
        if (seen := self._see(path, self.lag)) is None:
            raise FileNotFoundError(path)
        return seen[1]

    def get_file(self, path: str, target: str, **rest: Any) -> None:
        Path(target).write_bytes(self.cat_file(path))

    def pipe_file(self, path: str, value: bytes, **rest: Any) -> None:
        self._put(path, value)

    def put_file(self, source: str, path: str, **rest: Any) -> None:
        self._put(path, Path(source).read_bytes())

    def rm_file(self, path: str) -> None:
        self._put(path, None)

    def find(self, place: str, **rest: Any) -> dict[str, Any]:
        self._meet()
        seen = {path: self._see(path, 2 * self.lag) for path in self.objects if path.startswith(f"{place}/")}
        return {path: {"size": len(one[1]), "mtime": one[0]} for path, one in seen.items() if one}
