"""What a gate found, as people read it: lines in a terminal, and Markdown."""

from pathlib import Path

from enginesmith.pipeline.judgement import Gate
from enginesmith.pipeline.report.markup import plain


def lines(found: Gate) -> list[str]:
    """One for each judgement, one for each thing to know, and what that comes to."""
    judged = [f"{'held' if one.passed else 'BROKEN'}: {one.text}" for one in found.verdicts]
    said = [*judged, *(f"note: {text}" for text in found.cautions), sentence(found)]
    return [" ".join(text.split()) for text in said]


def sentence(found: Gate) -> str:
    """The gate in one sentence."""
    about = f"{found.variant} of {found.run}" if found.variant else found.run
    broken = len(found.breaches)
    if broken:
        return f"{about}: {broken} of {len(found.verdicts)} broken"
    if found.updated:
        return f"{about} is the baseline in {found.baseline} now"
    return f"{about}: all {len(found.verdicts)} held" if found.verdicts else f"{about}: nothing was judged"


def markdown(found: Gate) -> str:
    """The same for the summary of a job, or a comment."""
    mark = {True: "held", False: "**broken**"}
    items = [f"- {mark[one.passed]}: {plain(one.text)}" for one in found.verdicts]
    notes = [f"- note: {plain(text)}" for text in found.cautions]
    title = f"### Gate: {'passed' if found.passed else 'broken'}, {plain(Path(found.run).name)}"
    return "\n".join([title, "", plain(sentence(found)), "", *items, *notes]) + "\n"
