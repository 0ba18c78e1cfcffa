"""The file through which a test and the runtime's processes share counts, faults and the card's memory.

Its layout is that of tests/cuda/runtime/control.h.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

FIELDS = (
    "calls",
    "allocations",
    "launches",
    "captures",
    "out_of_memory_at",
    "out_of_memory_more",
    "sticky_at",
    "lost_at",
    "invalid_capture_at",
    "wrong_columns",
    "faults",
    "fault_pid",
    "lost",
    "looks",
    "slow_at",
)
DEVICES, PROCESSES = 8, 512
_WORD = struct.calcsize("q")
_PLACE = _WORD * (1 + DEVICES)
_SIZE = _WORD * len(FIELDS) + _PLACE * PROCESSES


@dataclass(frozen=True)
class Control:
    """A card: it is new where its file is not there yet."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.exists():
            self.path.write_bytes(bytes(_SIZE))

    def read(self, name: str) -> int:
        """A count, or the call at which a fault is made."""
        with self.path.open("rb") as file:
            file.seek(FIELDS.index(name) * _WORD)
            return int(struct.unpack("q", file.read(_WORD))[0])

    def write(self, **values: int) -> None:
        """Set counts and faults, as ``out_of_memory_at=12``: from 1 on, over all processes since the counts were 0."""
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), _SIZE) as memory:
            for name, value in values.items():
                struct.pack_into("q", memory, FIELDS.index(name) * _WORD, value)

    def used_bytes(self, device: int = 0) -> dict[int, int]:
        """Count what each living process has taken of a device."""
        content = self.path.read_bytes()[_WORD * len(FIELDS) :]
        places = struct.iter_unpack(f"{1 + DEVICES}q", content)
        return {pid: taken[device] for pid, *taken in places if pid and taken[device] and _alive(pid)}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
