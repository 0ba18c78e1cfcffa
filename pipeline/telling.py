"""Whom a store tells what people should know: the step that waits for it, else standard error."""

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator

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
