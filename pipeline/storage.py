"""The system's errors about files, in the words of what was being kept."""

import contextlib
import errno
import os
from collections.abc import Iterator

from enginesmith.pipeline.errors import StoreError


@contextlib.contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Turn what the file system refuses into one message.

    Raises:
        StoreError: a full disk, missing rights, a read-only file system.
    """
    try:
        yield
    except OSError as error:
        raise translated(error, place) from error


def translated(error: OSError, place: str) -> StoreError:
    """The message for a file system's refusal."""
    remedies = {
        errno.ENOSPC: "free some space (`enginesmith cache prune --local --max-size 5GiB`) or choose another disk",
        errno.EDQUOT: "free some space (`enginesmith cache prune --local --max-size 5GiB`) or choose another disk",
        errno.EACCES: "choose a folder that you may write to",
        errno.EPERM: "choose a folder that you may write to",
        errno.EROFS: "choose a folder that you may write to",
    }
    if error.errno == errno.EEXIST:
        return StoreError(f"{place}: a file is where a folder has to be", "choose another place")
    what = os.strerror(error.errno).lower() if error.errno else str(error)
    return StoreError(f"{place}: {what}", remedies.get(error.errno or 0, "check the path and its rights"))
