"""Calls of a service that may be away for a while: what is worth trying again, for how long, and what people are told.

Waits double from half a second to half a minute, each times a random factor between a half and one and a half, so that
many machines do not come back at the same moment (exponential back-off with jitter). Of calls that wait together one
is told of.
"""

import contextlib
import contextvars
import errno
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from enginesmith.pipeline.errors import EnginesmithError, StoreError, translated
from enginesmith.pipeline.store.address import credentials_of

P = ParamSpec("P")
T = TypeVar("T")

_TRANSIENT_ERRNOS = {
    *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ETIMEDOUT),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH),
    *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EREMOTEIO, errno.ESTALE),
}
_TRANSIENT_NAMES = {
    *("ConnectionError", "HTTPClientError", "ResponseStreamingError", "IncompleteReadError"),  # botocore
    *("ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError"),  # aiohttp
    *("TransportError", "RetryError", "ServiceRequestError", "ServiceResponseError", "SSHException", "EOFError"),
}
"""Classes that libraries of services have for a connection that was not made or was lost, and that are no OSError."""
_NO_SUCH_TLS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""In messages of OpenSSL: whom nobody vouches for, and who speaks no TLS, as at https:// for a server of http://."""
_KEPT = "what was done is kept on this machine, and the same command goes on from there"
_TRANSIENT_STATUSES = {408, 409, 425, 429, *range(500, 600)} - {501, 505, 507}


@dataclass
class Retries:
    """Calls of one service, from any number of threads."""

    place: str
    """What is called, for messages."""
    tell: Callable[[str], None]
    """Takes news for people, a line each."""
    total_seconds: float = 300.0
    """How long one call is tried."""
    first_seconds: float = 0.5
    longest_seconds: float = 30.0
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits any more: what is called from then on fails."""
    _given_up: bool = False
    """Whether a call was tried for the whole time; the next one has one attempt to find the service back."""
    _told_at: float | None = None
    """When people were told that it is away, until they are told that it is back."""
    _silent_until: float = 0.0
    """What was told last holds until then."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``work`` until it answers.

        Raises:
            FileNotFoundError: it says that there is no such file; the caller knows what that means.
            StoreError: the service refuses it, or was away for the whole time.
        """
        deadline = time.monotonic() + (0 if self._given_up else self.total_seconds)
        for wait in self._waits():
            began = time.monotonic()
            if self.stopped.is_set():
                raise StoreError(f"{self.place}: nobody waits for it any more", _KEPT)
            try:
                answer = work(*args, **kwargs)
            except (FileNotFoundError, EnginesmithError):  # an answer, too
                self._is_there(began)
                raise
            except Exception as error:
                if not is_transient(error):
                    raise refusal(error, self.place) from error
                if self.stopped.is_set() or time.monotonic() + wait > deadline:
                    self._given_up = True
                    raise self._lost(error) from error
                self._is_away(error, wait)
            else:
                self._is_there(began)
                return answer
            self.stopped.wait(wait)
        raise AssertionError("waits do not end")

    def _waits(self) -> Iterator[float]:
        wait = self.first_seconds
        while True:
            yield wait * random.uniform(0.5, 1.5)
            wait = min(2 * wait, self.longest_seconds)

    def _is_away(self, error: Exception, wait: float) -> None:
        with self._lock:
            if (now := time.monotonic()) < self._silent_until:
                return
            self._told_at, self._silent_until = now, now + wait
        self.tell(f"{self.place} cannot be reached ({_brief(error)}); trying again in {wait:.1f} s")

    def _is_there(self, began: float) -> None:
        """It answered a call that ``began`` then: if that was before people were told, it may be away since."""
        with self._lock:
            self._given_up, back = False, self._told_at is not None and began >= self._told_at
            self._told_at = None if back else self._told_at
        if back:
            self.tell(f"{self.place} is reachable again")

    def _lost(self, error: Exception) -> StoreError:
        return StoreError(
            f"{self.place} cannot be reached: {_brief(error)}",
            f"check the network and the address (for S3-compatible services: AWS_ENDPOINT_URL); {_KEPT}",
        )


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: a connection that failed or was lost, a service that is overloaded."""
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUSES
    if any(words in str(error) for words in _NO_SUCH_TLS) or isinstance(error, PermissionError):
        return False
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return error.errno is None or error.errno in _TRANSIENT_ERRNOS
    return bool({kind.__name__ for kind in type(error).__mro__} & _TRANSIENT_NAMES)


def refusal(error: BaseException, place: str) -> StoreError:
    """The message for an error that trying again does not mend."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"{place}, or this machine's cache of it: no space left",
            "free some space (`enginesmith cache prune --local --max-size 5GiB` on this machine)",
        )
    protocol = place.rpartition("://")[0].rpartition(" ")[2]
    if protocol == "file" and isinstance(error, OSError):
        return translated(error, place)
    names = {kind.__name__ for kind in type(error).__mro__}
    if (
        isinstance(error, PermissionError)
        or _status(error) in (401, 403)
        or any("Credential" in name for name in names)
    ):
        return StoreError(
            f"{place} refuses access: {_brief(error)}",
            f"check the rights, and the credentials in the environment: {credentials_of(protocol)}",
        )
    return StoreError(f"{place}: {_brief(error)}", "check the address, and what the service says about the request")


def _status(error: BaseException | None) -> int | None:
    """The HTTP status that a service answered with, from the error or what caused it."""
    while error is not None:
        response = getattr(error, "response", None)
        answered = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for status in (answered, *(getattr(error, name, None) for name in ("status", "status_code", "code"))):
            if isinstance(status, int) and 400 <= status < 600:
                return status
        error = error.__cause__
    return None


def _brief(error: BaseException) -> str:
    """One line, not too long; a library's own words hold no credentials, as none are in the address."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"


# Whom a store tells what people should know: the step that waits for it, else standard error.

_log = logging.getLogger(__name__)
_listener: contextvars.ContextVar[Callable[[str], None]] = contextvars.ContextVar("listener", default=_log.warning)


def notify(text: str) -> None:
    """One line, to the one who asked last in this thread."""
    _listener.get()(text)


@contextlib.contextmanager
def notifications_to(listener: Callable[[str], None]) -> Iterator[None]:
    """In this block and this thread, lines go to ``listener``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
