"""Many models for many targets: what a fleet file asks for, what came of it, and what changed since the last one."""

from enginesmith.pipeline.fleet.file import Entry, Fleet, read

__all__ = ["Entry", "Fleet", "read"]
