"""Parse the address of a store, a folder or a shared URL, and open the file system of a URL."""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.errors import MissingCapability, UsageError, install_command

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    **dict.fromkeys(("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS"),
    **dict.fromkeys(("az", "abfs", "abfss"), "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
}
"""Protocol → the environment variables that its file system reads."""
_READ_ONLY = ("http", "https", "data", "git", "github", "zip")


@dataclass(frozen=True)
class Address:
    """A store's address."""

    text: str
    """Opens the same store on another machine: the URL, or the absolute path."""
    folder: Path
    """Folder on this machine: the store itself, or the cache of the shared one."""
    url: str = ""
    """Empty for a folder."""


def parse_address(place: Path | str) -> Address:
    """Parse the path or URL of a store; a URL is cached below ``$ENGINESMITH_CACHE`` or the user's cache folder.

    Raises:
        UsageError: the URL names no place, or has a password in it.
    """
    if isinstance(place, str) and "://" in place:
        url = _url(place)
        chosen = os.environ.get("ENGINESMITH_CACHE")
        root = Path(chosen).expanduser().absolute() if chosen else _user_cache() / "enginesmith-shared"
        readable = re.sub(r"[^A-Za-z0-9]+", "-", url)[-40:].strip("-")
        return Address(url, root / f"{readable}-{json_digest(url)[:16]}", url)
    path = Path(place)
    if path.parts and path.parts[0].endswith(":"):
        meant = f"{path.parts[0]}//{'/'.join(path.parts[1:])}"
        raise UsageError(f"{path} looks like a URL that lost a slash", f"did you mean {meant}? Give it as text")
    folder = path.expanduser().absolute()
    return Address(str(folder), folder)


def default_address() -> Address:
    """Return ``$ENGINESMITH_STORE``, else ``enginesmith`` in the user's cache folder.

    Raises:
        UsageError: neither is set, and the user has no home folder.
    """
    return parse_address(os.environ.get("ENGINESMITH_STORE") or _user_cache() / "enginesmith")


def credential_variables(protocol: str) -> str:
    """Name the environment variables that hold the credentials of a protocol."""
    return _CREDENTIALS.get(protocol, f"FSSPEC_{protocol.upper()}_…, as FSSPEC_{protocol.upper()}_PASSWORD")


def _url(text: str) -> str:
    match = _URL.fullmatch(text)
    protocol, rest = (match[1].lower(), match[2]) if match else ("", "")
    if re.match(r"[^@]*:[^@]*@", rest) or "?" in rest:
        raise UsageError(
            f"the URL of the {protocol}:// store holds a password or a signature, which others would see",
            f"omit it; credentials are read from the environment: {credential_variables(protocol)}",
        )
    if "::" in text or not rest.strip("/"):
        raise UsageError(f"{text} is no valid address of a store", "name one as s3://bucket/folder")
    if protocol in _READ_ONLY:
        raise UsageError(f"{text} cannot be written to", "name a place that can, as s3://bucket/folder")
    if protocol not in ("file", "local"):  # two names of one
        return f"{protocol}://{rest.rstrip('/')}"
    if not rest.startswith(("/", "~")):
        raise UsageError(f"{text} would be another folder wherever it is used", f"did you mean file:///{rest}?")
    return f"file://{Path(rest).expanduser().absolute()}"


def _user_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise UsageError(
            f"user {os.getuid()} has no home folder: HOME is not set, and /etc/passwd has no such user",
            "set ENGINESMITH_STORE to a folder that you may write to; it keeps results for later runs",
        ) from error


_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def open_filesystem(url: str) -> tuple[Any, str]:
    """Open fsspec's file system for a URL, without caches of listings; returns it and the path in it.

    Raises:
        UsageError: no file system has that protocol.
        MissingCapability: the package for it is not installed.
        Exception: as the file system's library raises, where it connects to a service now and that fails.
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
        near = difflib.get_close_matches(protocol, ("file", "sftp", *_PACKAGES), n=1, cutoff=0.5)
        raise UsageError(
            f"{url} cannot be a store: {' '.join(str(error).split())}",
            (f"did you mean {near[0]}://? " if near else "")
            + "file://, s3:// and gs:// are among the protocols that can; others: "
            "https://filesystem-spec.readthedocs.io/en/latest/api.html#implementations",
        ) from error
    return system, root.rstrip("/")
