"""Repeat calls of a service that cannot be reached for a while, and notify people.

Waits double from half a second to half a minute, each times a random factor between a half and one and a half, so that
many machines do not come back at the same moment (exponential back-off with jitter). Of calls that wait together
one is reported.
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

from enginesmith.pipeline.errors import EnginesmithError, StoreError, explain_errno
from enginesmith.pipeline.store.address import credential_variables
from enginesmith.pipeline.units import shorten

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
"""Libraries' classes for connections that failed or were lost, which are no OSError."""
_NO_SUCH_TLS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""In messages of OpenSSL: an unknown certificate, and a server without TLS, as at https:// for a server of http://."""
_RESUME = "finished work is kept on this machine, and the same command resumes from there"
_TRANSIENT_STATUSES = {408, 409, 425, 429, *range(500, 600)} - {501, 505, 507}


@dataclass
class Retries:
    """Repeats calls of one service, from any number of threads."""

    place: str
    tell: Callable[[str], None]
    total_seconds: float = 300.0
    """Time for which one call is repeated."""
    first_seconds: float = 0.5
    longest_seconds: float = 30.0
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits any more: later calls fail."""
    _given_up: bool = False
    """A call was repeated for the whole time; the next one has one attempt."""
    _reported_at: float | None = None
    """Time at which people were notified that it cannot be reached, until they are that it can."""
    _silent_until: float = 0.0
    """No message is repeated until then."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``work`` until it succeeds.

        Raises:
            FileNotFoundError: there is no such file; the caller knows what that means.
            StoreError: the service refuses access, or could not be reached for the whole time.
        """
        deadline = time.monotonic() + (0 if self._given_up else self.total_seconds)
        longest_wait = self.first_seconds
        while True:
            began, wait = time.monotonic(), longest_wait * random.uniform(0.5, 1.5)
            longest_wait = min(2 * longest_wait, self.longest_seconds)
            if self.stopped.is_set():
                raise StoreError(f"{self.place}: nobody waits for it any more", _RESUME)
            try:
                answer = work(*args, **kwargs)
            except (FileNotFoundError, EnginesmithError):  # an answer, too
                self._report_success(began)
                raise
            except Exception as error:
                if not is_transient(error):
                    raise explain_refusal(error, self.place) from error
                if self.stopped.is_set() or time.monotonic() + wait > deadline:
                    self._given_up = True
                    raise StoreError(
                        f"{self.place} cannot be reached: {_brief(error)}",
                        f"check the network and the address (for S3-compatible services: AWS_ENDPOINT_URL); {_RESUME}",
                    ) from error
                self._report_failure(error, wait)
            else:
                self._report_success(began)
                return answer
            self.stopped.wait(wait)

    def _report_failure(self, error: Exception, wait: float) -> None:
        with self._lock:
            if (now := time.monotonic()) < self._silent_until:
                return
            self._reported_at, self._silent_until = now, now + wait
        self.tell(f"{self.place} cannot be reached ({_brief(error)}); trying again in {wait:.1f} s")

    def _report_success(self, began: float) -> None:
        """Notify people that the service is back, if the call ``began`` after they were told that it is away."""
        with self._lock:
            self._given_up, back = False, self._reported_at is not None and began >= self._reported_at
            self._reported_at = None if back else self._reported_at
        if back:
            self.tell(f"{self.place} is reachable again")


def is_transient(error: BaseException) -> bool:
    """Tell whether a repeated call may succeed: the connection failed or was lost, or the service is overloaded."""
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


def explain_refusal(error: BaseException, place: str) -> StoreError:
    """Turn an error that repeating does not mend into one with a remedy."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"{place}, or this machine's cache of it: no space left",
            "free some space (`enginesmith cache prune --local --max-size 5GiB` on this machine)",
        )
    protocol = place.rpartition("://")[0].rpartition(" ")[2]
    if protocol == "file" and isinstance(error, OSError):
        return explain_errno(error, place)
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, PermissionError) or _status(error) in (401, 403) or any("Credential" in key for key in names):
        return StoreError(
            f"{place} refuses access: {_brief(error)}",
            f"check the rights, and the credentials in the environment: {credential_variables(protocol)}",
        )
    return StoreError(f"{place}: {_brief(error)}", "check the address, and what the service says about the request")


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status of a service's answer, from the error or its causes."""
    while error is not None:
        response = getattr(error, "response", None)
        answered = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for status in (answered, *(getattr(error, name, None) for name in ("status", "status_code", "code"))):
            if isinstance(status, int) and 400 <= status < 600:
                return status
        error = error.__cause__
    return None


def _brief(error: BaseException) -> str:
    """Shorten an error to one line; a library's own words hold no credentials, as none are in the address."""
    text = " ".join(str(error).split()) or type(error).__name__
    return shorten(text, 200)


# Messages of a store go to the step that waits for it, else to standard error.

_log = logging.getLogger(__name__)
_listener: contextvars.ContextVar[Callable[[str], None]] = contextvars.ContextVar("listener", default=_log.warning)


def notify(text: str) -> None:
    """Pass a line to the listener of this thread."""
    _listener.get()(text)


@contextlib.contextmanager
def notifications_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Route messages of this thread to ``listener`` while the block runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
