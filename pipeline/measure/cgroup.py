"""What the container of this process may use, and how often it was held to that (cgroups(7), both versions)."""

from pathlib import Path
from typing import NamedTuple

from enginesmith.pipeline.measure.kernel_files import numbers, text

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED_BYTES = 1 << 60


class MemoryLimit(NamedTuple):
    """The limit that leaves the least, and what it leaves."""

    limit_bytes: int
    left_bytes: int | None
    """None where the group's use is not shown. Cached files that would give way do not count as used."""


class Throttling(NamedTuple):
    """Counted since the group was made: periods of the quota, those in which it ran out, and the time lost."""

    periods: int
    throttled_periods: int
    throttled_seconds: float


def quota_cores() -> float | None:
    """Cores' worth of time: the least of all limits. ``cpu.max`` holds ``quota period``; version 1 has −1 for none."""
    limits = []
    for folder in _folders(""):
        quota, _, period = (text(folder / "cpu.max") or "max").partition(" ")
        limits += [int(quota) / int(period)] if quota != "max" else []
    for folder in _folders("cpu"):
        quota, period = (text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        limits += [int(quota) / int(period)] if quota and period and int(quota) > 0 else []
    return min(limits, default=None)


def memory_limit() -> MemoryLimit | None:
    """None where no limit is set."""
    files = [(folder, "memory.max", "memory.current", "inactive_file") for folder in _folders("")]
    files += [
        (folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for folder in _folders("memory")
    ]
    found = []
    for folder, limit_file, use_file, cached in files:
        limit, used = text(folder / limit_file), text(folder / use_file)
        if limit and limit != "max" and int(limit) < _UNLIMITED_BYTES:
            reclaimable = numbers(folder / "memory.stat").get(cached, 0)
            found.append(MemoryLimit(int(limit), max(0, int(limit) - int(used) + reclaimable) if used else None))
    return min(found, key=lambda one: one.limit_bytes if one.left_bytes is None else one.left_bytes, default=None)


def throttling() -> Throttling | None:
    """Of the group that was held back the most; None where no group has a quota or counts."""
    counts = [numbers(folder / "cpu.stat") for folder in (*_folders(""), *_folders("cpu"))]
    found = [
        Throttling(
            one["nr_periods"],
            one["nr_throttled"],
            one["throttled_usec"] / 1e6 if "throttled_usec" in one else one.get("throttled_time", 0) / 1e9,
        )
        for one in counts
        if one.get("nr_periods")
    ]
    return max(found, key=lambda one: one.throttled_seconds, default=None)


def _folders(controller: str) -> list[Path]:
    """This process's group and those above it, as far as they are mounted."""
    root = _CGROUP / controller if controller else _CGROUP
    group = Path(_own_group(controller).lstrip("/"))
    return [root / group, *(root / parent for parent in group.parents)]


def _own_group(controller: str) -> str:
    """The path of this process's control group; ``controller`` is empty for version 2."""
    for line in (text(_OWN) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == controller or controller in controllers.split(","):
            return path
    return "/"
