"""What reads and writes at a URL: the file systems of fsspec, opened so that nothing stale is remembered."""

import difflib
import inspect
from typing import Any

from enginesmith.pipeline.errors import MissingCapability, UsageError, install_command

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}


def opened(url: str) -> tuple[Any, str]:
    """What reads a URL, and the path in it.

    Raises:
        UsageError: no file system has that protocol.
        MissingCapability: the package for it is not installed.
        Exception: what the file system's library raises, where it connects to a service now and that fails.
    """
    protocol = url.partition("://")[0]
    try:
        import fsspec

        system, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        raise MissingCapability(
            f"stores at {protocol}:// need a package that is not installed: {error}",
            install_command(package) if package else "install it with pip, in the environment of enginesmith",
        ) from error
    except ValueError as error:
        near = difflib.get_close_matches(protocol, fsspec.available_protocols(), n=1, cutoff=0.5)
        raise UsageError(
            f"{url} cannot be a store: {' '.join(str(error).split())}",
            (f"did you mean {near[0]}://? " if near else "")
            + "file://, s3:// and gs:// are among the protocols that can; others: "
            "https://filesystem-spec.readthedocs.io/en/latest/api.html#implementations",
        ) from error
    return system, root.rstrip("/")


def in_one_request(system: Any) -> dict[str, int]:
    """Options for reading a small file: s3fs would ask for its size first, and read parts of it at the same time."""
    read = getattr(system, "_cat_file", None)
    return {"max_concurrency": 1} if read and "max_concurrency" in inspect.signature(read).parameters else {}
