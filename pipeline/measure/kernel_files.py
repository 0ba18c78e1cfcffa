"""Small files in which the kernel shows its state; what is not there is None."""

from pathlib import Path


def text(path: Path) -> str | None:
    """A file's content, stripped; None where there is none."""
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def fields(path: Path) -> dict[str, str]:
    """``name : value`` lines; the first of each name."""
    found: dict[str, str] = {}
    for row in (text(path) or "").splitlines():
        name, _, value = row.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def numbers(path: Path) -> dict[str, int]:
    """``name number`` lines."""
    rows = (row.split() for row in (text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
