"""Test what is tried again, for how long; what is not; and what people are told."""

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Timer
from typing import Any

import pytest

from enginesmith.pipeline.errors import StoreError
from enginesmith.pipeline.store.retry import Retries, explain_refusal, is_transient

PLACE = "the store s3://team/x"


class EndpointConnectionError(Exception):
    """Stand for botocore's: no OSError, and below one of these names."""


class HTTPClientError(EndpointConnectionError):
    """The name that tells."""


class NoCredentialsError(Exception):
    """Stand for botocore's."""


class Answered(Exception):
    """An HTTP error with its status, as gcsfs has it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


class ClientError(Exception):
    """An HTTP error as botocore has it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (TimeoutError("timed out"), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (OSError(errno.ESTALE, "stale file handle"), True),
        (OSError("Socket is closed"), True),
        (HTTPClientError("could not connect"), True),
        (Answered(503), True),
        (Answered(429), True),
        (caused(OSError(errno.EIO, "?"), ClientError(500)), True),
        (caused(OSError(errno.EIO, "?"), ClientError(400)), False),
        (caused(PermissionError("Forbidden"), ClientError(403)), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (OSError(errno.ENOSPC, "no space"), False),
        (OSError(errno.EROFS, "read-only"), False),
        (NoCredentialsError("none"), False),
        (HTTPClientError("SSL: CERTIFICATE_VERIFY_FAILED"), False),
        (HTTPClientError("[[SSL: WRONG_VERSION_NUMBER] wrong version number"), False),
        (ValueError("what?"), False),
    ],
    ids=repr,
)
def test_only_what_may_pass_is_tried_again(error: Exception, again: bool) -> None:
    assert is_transient(error) == again


@pytest.mark.parametrize(
    ("error", "message", "remedy"),
    [
        (PermissionError("Forbidden"), "refuses access", "AWS_ACCESS_KEY_ID"),
        (NoCredentialsError("Unable to locate credentials"), "refuses access", "AWS_ACCESS_KEY_ID"),
        (Answered(401), "refuses access", "AWS_ACCESS_KEY_ID"),
        (OSError(errno.ENOSPC, "x"), "no space left", "cache prune --local"),
        (ValueError("what?"), "what?", "check the address"),
    ],
    ids=repr,
)
def test_a_refusal_says_what_to_do(error: Exception, message: str, remedy: str) -> None:
    found = explain_refusal(error, PLACE)
    assert message in found.message
    assert remedy in found.remedy


def failing(times: int, error: Exception | None = None) -> Any:
    """Fails so often, then answers; counts in ``calls``."""

    def work() -> str:
        work.calls += 1  # type: ignore[attr-defined]
        if work.calls <= times:  # type: ignore[attr-defined]
            raise error or ConnectionError("down")
        return "here"

    work.calls = 0  # type: ignore[attr-defined]
    return work


def test_waits_grow_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    retries = Retries(PLACE, said.append, first_seconds=0.001, longest_seconds=0.004)
    waits: list[float] = []
    really = retries.stopped.wait
    monkeypatch.setattr(retries.stopped, "wait", lambda seconds: (waits.append(seconds), really(seconds)))
    assert retries(failing(6)) == "here"
    assert len(waits) == 6
    assert all(0.5 * whole <= wait <= 1.5 * whole for wait, whole in zip(waits, (1e-3, 2e-3, *[4e-3] * 4), strict=True))
    assert len(set(waits)) == 6
    assert len(said) == 7
    assert said[0].startswith(f"{PLACE} cannot be reached (down); trying again in ")
    assert said[-1] == f"{PLACE} is reachable again"


def test_an_outage_that_many_calls_see_is_told_once() -> None:
    said: list[str] = []
    retries, together = Retries(PLACE, said.append, first_seconds=0.1), Barrier(8)
    works = [failing(1) for _ in range(8)]

    def work(number: int) -> Any:
        if not works[number].calls:
            together.wait()
        return works[number]()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: retries(work, number), range(8))) == ["here"] * 8
    assert len(said) == 2
    assert said[-1] == f"{PLACE} is reachable again"


def test_it_ends_at_some_time_and_then_asks_once_only() -> None:
    retries = Retries(PLACE, lambda text: None, total_seconds=0.05, first_seconds=0.01)
    work = failing(10**6)
    with pytest.raises(StoreError, match="cannot be reached: down") as caught:
        retries(work)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert "AWS_ENDPOINT_URL" in caught.value.remedy
    tried = work.calls
    assert tried > 2
    with pytest.raises(StoreError):
        retries(work)
    assert work.calls == tried + 1
    assert retries(failing(0)) == "here"
    assert retries(failing(2)) == "here"  # there again, it is waited for again


def test_that_there_is_no_such_file_is_an_answer_too() -> None:
    said: list[str] = []
    retries = Retries(PLACE, said.append, total_seconds=0.0, first_seconds=0.001)
    with pytest.raises(StoreError):
        retries(failing(1))
    retries.total_seconds = 60.0

    def lacking() -> None:
        raise FileNotFoundError("no such key")

    with pytest.raises(FileNotFoundError):
        retries(lacking)
    answers = iter([ConnectionError("down"), FileNotFoundError("no such key")])

    def away() -> None:
        raise next(answers)

    with pytest.raises(FileNotFoundError):
        retries(away)  # it was there, so it is waited for again
    assert said[-1] == f"{PLACE} is reachable again"


def test_what_trying_again_does_not_mend_fails_at_once() -> None:
    for error in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), PermissionError("403"), ValueError("what?")):
        work = failing(1, error)
        with pytest.raises(StoreError):
            Retries(PLACE, pytest.fail)(work)
        assert work.calls == 1
    with pytest.raises(FileNotFoundError):
        Retries(PLACE, pytest.fail)(failing(1, FileNotFoundError("no such key")))


def test_a_call_from_before_the_outage_does_not_say_that_it_is_over() -> None:
    said: list[str] = []
    retries = Retries(PLACE, said.append, first_seconds=0.001)

    def long() -> str:
        assert retries(failing(1)) == "here"  # away meanwhile, and back
        retries._report_failure(ConnectionError("away again"), 60.0)
        return "done"

    assert retries(long) == "done"
    assert [line.partition(PLACE)[2].split(" (")[0] for line in said] == [
        " cannot be reached",
        " is reachable again",
        " cannot be reached",
    ]


def test_nobody_waits_once_it_is_stopped() -> None:
    retries = Retries(PLACE, lambda text: None, first_seconds=30.0)
    Timer(0.05, retries.stopped.set).start()
    work = failing(10**6)
    with pytest.raises(StoreError):
        retries(work)
    assert work.calls == 1
