"""The arena's results as Markdown: what was won, every cell, and the cells that were not won with the reason."""

from collections.abc import Iterator
from typing import Any

from enginesmith.pipeline.measure.statistics import Interval

Row = dict[str, Any]
_MEBIBYTE = 2**20


def markdown(found: Row) -> str:
    """Write the whole report."""
    return "\n".join(_lines(found)) + "\n"


def describe_cell(cell: Row) -> str:
    """Say in one line who won a cell, and how enginesmith did."""
    ours = cell["ours"]
    return f"  winner: {cell['winner']}; enginesmith: {'won' if ours['won'] else 'not won'}, {ours['reason']}"


def _lines(found: Row) -> Iterator[str]:
    yield "# The arena\n\nTimes are medians over rounds, with their 95 % intervals. The winner is the fastest of those"
    yield "that lose no more than is allowed. A cell is won if enginesmith is first, or within the interval of the"
    yield "first. Job: from the model to the first answer, the export included for rivals that take an ONNX graph."
    yield "Server: memory above what its libraries take. What took over twice the winner's time in the first of"
    yield "several launches was not launched again: it is marked as such.\n"
    yield "| machine | cells | won | within the allowed loss | made in at most the median rival's time |"
    yield "| --- | --- | --- | --- | --- |"
    for machine, count in found["count"].items():
        numbers = (count[name] for name in ("cells", "won", "within_budget", "not_slower_to_make"))
        yield f"| {machine} | {' | '.join(map(str, numbers))} |"
    lost = [cell for cell in found["cells"] if not cell["ours"]["won"]]
    yield "\n## Cells that enginesmith does not win\n"
    if lost:
        yield "| machine | cell | winner | reason |\n| --- | --- | --- | --- |"
        for cell in lost:
            yield f"| {cell['machine']} | {_name(cell)} | {cell['winner']} | {cell['ours']['reason']} |"
    else:
        yield "None."
    for machine in found["count"]:
        yield f"\n## {machine}"
        for cell in found["cells"]:
            if cell["machine"] == machine:
                yield from _cell(cell)
    yield "\n## Versions\n"
    for name, packages in found["environments"].items():
        yield f"- {name}: {', '.join(packages)}"


def _name(cell: Row) -> str:
    return f"{cell['model']}, batch {cell['batch']}, {cell['threads'] or 'all'} thread{'s' * (cell['threads'] != 1)}"


def _cell(cell: Row) -> Iterator[str]:
    yield f"\n### {_name(cell)}\n\n`{cell['command']}`; {cell['others']:.1f} threads of other programs ran.\n"
    yield "| rival | ms a call | × the winner's time | drop (allowed: {}) | job | its peak | server |".format(
        cell["max_drop"]
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    most = max((row["launches"] for row in cell["rows"]), default=1)
    for row in cell["rows"]:
        name = f"**{row['rival']}**" if row["rival"] == cell["winner"] else row["rival"]
        marks = ", disturbed" * row["disturbed"] + ", 1 launch" * (row["launches"] < most)
        ratio = "" if row["times_the_winner"] is None else Interval(**row["times_the_winner"]).times()
        memory = f"{row['job_peak_bytes'] / _MEBIBYTE:.0f} MiB | {row.get('growth_bytes', 0) / _MEBIBYTE:.0f} MiB"
        median = Interval(**row["median_ms"]).format("{:.3g}".format)
        yield f"| {name} | {median}{marks} | {ratio} | {_drop(row)} | {row['job_seconds']:.0f} s | {memory} |"
    for name, reason in cell["failures"].items():
        yield f"| {name} | – | | {reason.replace('|', '/')} | | | |"


def _drop(row: Row) -> str:
    quality = row["quality"]
    if quality is None:
        return "not judged"
    between = "" if quality["drop_low"] is None else f" [{quality['drop_low']:+.4f}, {quality['drop_high']:+.4f}]"
    return f"{quality['drop']:+.4f}{between}{'' if row['allowed'] else ': too much'}"
