"""The timing cache of the enterprise flavour: what kernels took, kept so that another build chooses the same."""

from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import file_digest, write_whole
from enginesmith.pipeline.errors import UsageError


def attach(trt: Any, config: Any, file: Path, *, locked: bool) -> Any:
    """Give the configuration the cache in ``file``, or a new one where there is none.

    Raises:
        UsageError: the file is of another device or version, or not a timing cache; or it is locked and not there.
    """
    if locked and not file.is_file():
        raise UsageError(
            f"--locked needs the timing cache {file}, and there is none", "build once without --locked to make it"
        )
    stored = file.read_bytes() if file.is_file() else b""
    cache = config.create_timing_cache(stored)
    replaced = bool(stored) and not cache.queryKeys()  # what it cannot read becomes an empty cache, with a warning
    if replaced or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise UsageError(
            f"the timing cache {file} is damaged, or of another device or version of TensorRT {trt.__version__}",
            "give another one with --timing-cache, or remove it to have it made anew",
        )
    return cache


def keep(cache: Any, file: Path, locked: bool) -> str:
    """Write the cache back, whole or not at all, and give its digest; a locked one is left as it is."""
    if not locked:
        write_whole(file, bytes(cache.serialize()))
    return file_digest(file)
