"""Render ``junit.xml``: each check of the gate, budget, variant and fidelity check is a test case."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.report import gate as gates
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.fleet import EntryRecord, FleetRecord
from enginesmith.pipeline.results.gate_report import FleetGate, Gate
from enginesmith.pipeline.results.run import Run

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no way to write (section 2.2, "Characters")."""


@dataclass(frozen=True)
class _Case:
    """One test case; without an outcome it passed."""

    name: str
    outcome: Literal["failure", "skipped", ""] = ""
    message: str = ""


def render(run: Run, gate: Gate | FleetGate | None = None) -> str:
    """Render a run as JUnit XML: a suite of its gate's checks, one of budgets, and one for each variant."""
    return _document(run.name, run.created, run.seconds, _gate_suites(gate) | _suites(run))


def render_fleet(record: FleetRecord, runs: Mapping[str, Run], gate: Gate | FleetGate | None = None) -> str:
    """Render a fleet as JUnit XML: suites of its gate, one of entries, and the suites of its ``runs`` by entry."""
    suites = _gate_suites(gate) | {"entries": [_make_entry_case(entry) for entry in record.entries]}
    for name, run in runs.items():
        suites |= {f"{name} {suite}": cases for suite, cases in _suites(run).items()}
    return _document(record.name, record.created, record.seconds, suites)


def _gate_suites(gate: Gate | FleetGate | None) -> dict[str, list[_Case]]:
    suites: dict[str, list[_Case]] = {}
    for entry, check in gates.tabulate(gate) if gate else ():
        outcome: Literal["failure", "skipped", ""] = "failure" if check.fails else "" if check.passed else "skipped"
        message = f"not judged: {check.text}" if check.state == "unjudged" else check.text
        case = _Case(gates.name_check(check), outcome, message)
        suites.setdefault(f"{entry} gate".strip(), []).append(case)
    return suites


def _suites(run: Run) -> dict[str, list[_Case]]:
    suites = {"budgets": list(_budgets(run))}
    for record in run.requested:
        failed = record.failure_at(run.deciding_batch)
        outcome: Literal["failure", "skipped"] = "failure" if failed or record.status == "failed" else "skipped"
        case = _Case("measured", outcome, failed or record.reason or record.status)
        measured = _Case("measured") if record.status == "measured" and not failed else case
        suites[f"variant {record.id}"] = [measured, *map(_make_check_case, record.fidelity)]
    return suites


def _make_entry_case(entry: EntryRecord) -> _Case:
    """Make the case of an entry; budgets that nobody holds have cases of their own."""
    if not entry.why_without_result:
        return _Case(entry.name)
    return _Case(entry.name, "failure" if entry.status == "failed" else "skipped", entry.why_without_result)


def _document(title: str, created: str, seconds: float, suites: Mapping[str, Sequence[_Case]]) -> str:
    counts = _counts([case for cases in suites.values() for case in cases])
    root = ElementTree.Element("testsuites", {"name": title, **counts, "time": f"{seconds:.3f}"})
    for name, cases in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **_counts(cases), "timestamp": created})
        for case in cases:
            element = ElementTree.SubElement(suite, "testcase", {"classname": name, "name": case.name})
            if case.outcome:
                outcome = ElementTree.SubElement(element, case.outcome, {"message": case.message})
                outcome.text = case.message  # Jenkins shows the attribute, GitLab the text
    ElementTree.indent(root)
    text = _NO_XML.sub("\ufffd", ElementTree.tostring(root, encoding="unicode"))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _budgets(run: Run) -> Iterator[_Case]:
    for verdict in run.verdicts:
        name = f"{verdicts.format_title(verdict.budget)}: {verdicts.format_limit(verdict)}"
        yield _Case(name) if verdict.passed else _Case(name, "failure", verdicts.format_verdict(verdict))
    for budget in verdicts.list_unjudged(run):
        yield _Case(verdicts.format_title(budget), "skipped", f"not judged: {run.winner_reason}")


def _make_check_case(entry: StageFidelity) -> _Case:
    """Make the case of a comparison with the reference, skipped where it judged nothing."""
    name = f"{entry.stage} at {entry.point} (batch {entry.batch})"
    if not entry.passed:
        return _Case(name, "failure", entry.reason or "it differs from the reference by more than is allowed")
    return _Case(name, "skipped", f"not judged: {entry.reason}") if entry.reason else _Case(name)


def _counts(cases: Sequence[_Case]) -> dict[str, str]:
    failed, skipped = (sum(case.outcome == outcome for case in cases) for outcome in ("failure", "skipped"))
    return {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "skipped": str(skipped)}
