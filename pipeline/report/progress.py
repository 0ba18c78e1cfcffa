"""Show how a plan runs: as a tree on a terminal, as plain lines anywhere else. Always on standard error."""

import contextlib
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from enginesmith.pipeline.execution.events import Event, Listener, Outcome, ShownStep
from enginesmith.pipeline.units import format_seconds

_HEARTBEAT_SECONDS = 30.0
_LONGEST = 160
"""Characters of a failure; the end of the run has all of it."""
_LONG_SECONDS = 10.0
"""Time from which a heartbeat names a step that is running."""
_ENDED_SHOWN = 100
"""Steps that have ended, in a tree: those of a fleet would fill any screen."""


@dataclass
class _Line:
    """A step's state."""

    step: ShownStep
    started: float | None = None
    ended: float | None = None
    text: str = ""
    outcome: Outcome | None = None


@dataclass
class _Board:
    """Lines of all steps that have begun, in order, and the steps that are left."""

    lines: dict[str, _Line] = field(default_factory=dict)
    left: dict[str, ShownStep] = field(default_factory=dict)
    """Planned steps that have not ended, by id."""
    planned: int = 0
    _seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations of this run's steps, by task."""
    _over: set[str] = field(default_factory=set)
    """Searches of which it was told that they are over."""

    def take(self, event: Event) -> _Line | None:
        """Update the step's line; None where there is none: for a plan, or a trial once its search is over."""
        search = event.step.id.rpartition("-")[0]
        if event.kind == "planned":
            self._over.discard(search)
            self.planned += event.step.id not in self.left
            self.left[event.step.id] = event.step
            self.lines.pop(event.step.id, None)  # it ended in an earlier round
            return None
        if event.kind == "finished":
            self.left.pop(event.step.id, None)
            if event.outcome and event.outcome.artifact and not event.outcome.cached:
                seconds = self._seconds.setdefault(event.step.task.title, [])
                seconds.append(event.outcome.artifact.history[-1].seconds)
        if search in self._over:
            return None
        trial = event.outcome.artifact if event.outcome else None
        known = [line.outcome.artifact for line in self.lines.values() if line.outcome and line.outcome.artifact]
        if event.step.task.title == "search" and trial and trial.sha256 in {artifact.sha256 for artifact in known}:
            begun = self.lines.pop(event.step.id, None)
            self._over |= {search} if begun else set()
            return begun and replace(begun, outcome=event.outcome)
        line = self.lines.setdefault(event.step.id, _Line(event.step))
        if event.kind == "started":
            line.started = time.monotonic()
        elif event.kind in ("progress", "note"):
            line.text = event.text
        else:
            line.ended, line.outcome = time.monotonic(), event.outcome
        return line

    def describe_running(self) -> Iterator[str]:
        """Describe the steps that have been running for long, and the progress of the whole."""
        for line in self.lines.values():
            running = line.started is not None and line.ended is None
            if running and time.monotonic() - (line.started or 0.0) >= _LONG_SECONDS:
                yield f"{line.step.id}: running for {_format_elapsed(line)}{line.text and ': ' + line.text}"
        if self.left:
            yield self.overall()

    def overall(self) -> str:
        """Describe the progress of the whole: ``18 of 27 steps, about 40 s left``, without the time if unknown."""
        seconds = self._estimate()
        time_left = f", about {format_seconds(seconds)} left" if seconds else ""
        return f"{self.planned - len(self.left)} of {self.planned} steps{time_left}"

    def _estimate(self) -> float | None:
        """Add up the limits of the steps left, or how long others of their task took; None where one has neither."""
        at_once = sum(line.started is not None and line.ended is None for line in self.lines.values())
        total = 0.0
        for step in self.left.values():
            known = self._seconds.get(step.task.title)
            expected = sum(known) / len(known) if known else step.task.expected_seconds
            if expected is None:
                return None
            line = self.lines.get(step.id)
            spent = time.monotonic() - line.started if line and line.started is not None else 0.0
            total += max(0.0, expected - spent) / (1 if step.task.exclusive else max(1, at_once))
        return total


@contextlib.contextmanager
def show_progress(quiet: bool = False) -> Iterator[Listener]:
    """Show events as long as the block lasts; ``quiet`` shows only notes."""
    if quiet:
        yield _say_notes
        return
    with _tree() if sys.stderr.isatty() else _plain_lines() as listener:
        yield listener


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _say_notes(event: Event) -> None:
    if event.kind == "note":
        _say(f"{event.step.id}: {event.text}")


@contextlib.contextmanager
def _plain_lines() -> Iterator[Listener]:
    board, lock, over, skipped = _Board(), threading.Lock(), threading.Event(), list[str]()

    def say_skipped() -> None:
        if skipped:
            steps = "1 step, as it needs" if len(skipped) == 1 else f"{len(skipped)} steps, as they need"
            _say(f"skipped: {steps} one that did not succeed")
        skipped.clear()

    def listener(event: Event) -> None:
        with lock:
            if event.kind == "device":
                _say(event.text)
                return
            line = board.take(event)
            if line is None:
                return
            if line.outcome and line.outcome.status == "skipped":
                skipped.append(line.step.id)
                return
            say_skipped()
            _say_notes(event)
            if event.kind == "started":
                _say(f"{event.step.id}: started")
            elif event.kind == "finished":
                _say(f"{event.step.id}: {_ending(line)}")

    def beat() -> None:
        while not over.wait(_HEARTBEAT_SECONDS):
            with lock:
                for text in board.describe_running():
                    _say(text)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield listener
    finally:
        over.set()
        say_skipped()


@contextlib.contextmanager
def _tree() -> Iterator[Listener]:
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape
    from rich.tree import Tree

    board, lock = _Board(), threading.Lock()

    def draw() -> Tree:
        with lock:
            root = Tree(f"[bold]enginesmith[/]  {board.overall()}" if board.planned else "[bold]enginesmith")
            groups: dict[str, Tree] = {}
            ended = [line for line in board.lines.values() if line.outcome is not None]
            skipped = {line.step.id for line in ended if line.outcome and line.outcome.status == "skipped"}
            hidden = {line.step.id for line in ended[:-_ENDED_SHOWN]} | skipped
            if hidden:
                root.add(f"[dim]{len(hidden)} that have ended or were skipped are not shown")
            for line in board.lines.values():
                if line.step.id in hidden:
                    continue
                parent, variant = root, line.step.variant
                if variant:
                    parent = groups.setdefault(variant, groups.get(variant) or root.add(f"[bold]{variant}"))
                parent.add(_markup(line))
            return root

    def listener(event: Event) -> None:
        if event.kind == "device":
            console.print(escape(event.text))
            return
        with lock:
            board.take(event)
        if event.kind == "note":
            console.print(f"{escape(event.step.id)}: {escape(event.text)}")

    console = Console(stderr=True)
    with Live(get_renderable=draw, console=console, refresh_per_second=4):
        yield listener


def _markup(line: _Line) -> str:
    from rich.markup import escape

    if line.outcome is None:
        return f"[yellow]▸[/] {line.step.id}  [dim]{_format_elapsed(line)}  {escape(line.text)}"
    sign = "[green]✓[/]" if line.outcome.good else "[red]✗[/]"
    return f"{sign} {line.step.id}  [dim]{escape(_ending(line))}"


def _ending(line: _Line) -> str:
    outcome = line.outcome
    assert outcome is not None
    if outcome.status == "unavailable":
        return f"not on this machine: {outcome.reason}"
    if outcome.artifact is None:
        return f"{outcome.status}: {textwrap.shorten(outcome.reason.splitlines()[0], _LONGEST, placeholder=' …')}"
    if outcome.artifact.rejected:
        return f"not good enough: {outcome.artifact.rejected}"
    last = outcome.artifact.history[-1]
    return f"{'reused' if outcome.cached else format_seconds(last.seconds)}  {last.effect}"


def _format_elapsed(line: _Line) -> str:
    return format_seconds(time.monotonic() - line.started) if line.started is not None else ""
