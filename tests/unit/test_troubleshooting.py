"""Messages that docs/troubleshooting.md explains are messages that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MESSAGE = re.compile(r"^\| `([^`]+)`", re.M)
MESSAGES = MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text())


@pytest.fixture(scope="module")
def sources() -> str:
    """All text of the code, with what separates the parts of a literal taken out."""
    texts = [path.read_text() for room in ("pipeline", "calibration") for path in (ROOT / room).rglob("*.py")]
    return " ".join(re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(texts)).split())


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_the_code(message: str, sources: str) -> None:
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert parts
    for part in parts:
        assert part in sources, f"{part!r} of {message!r} is said nowhere"
