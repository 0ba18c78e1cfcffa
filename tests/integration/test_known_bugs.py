"""The book of known bugs: the installed versions have those that it says, and nothing of it is out of date."""

import warnings
from pathlib import Path

import onnx
import pytest

from published_bugs import BUGS, probes
from published_bugs.case import KnownBug

_ROOT = Path(__file__).parents[2]
_PROBED = [
    pytest.param(bug, id=bug.name, marks=[pytest.mark.thorough] if bug.slow else [])
    for bug in BUGS.values()
    if bug.probe
]


@pytest.mark.parametrize("bug", _PROBED)
def test_the_installed_version_is_as_recorded(bug: KnownBug) -> None:
    if bug.installed() is None:
        pytest.skip(f"{bug.package} is not installed")
    assert bug.probe is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tools, which are older or newer than each other
        present = bug.probe(bug.make().right)
    assert present == bug.expected(), bug.describe_change(present)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_rebuilt_graph_gives_another_answer_for_some_input(bug: KnownBug) -> None:
    def answers(model: onnx.ModelProto, scale: float) -> probes.Answers:
        return probes.run_unoptimized(model, probes.draw_feeds(model, batch=9, scale=scale))

    right, wrong = bug.make()
    pairs = [
        pair for scale in (300.0, 1.0, 0.0) for pair in zip(answers(right, scale), answers(wrong, scale), strict=True)
    ]
    assert any(one.shape != other.shape or (one != other).any() for one, other in pairs)


def test_a_bug_that_is_gone_or_new_is_reported_in_plain_words() -> None:
    guarded = BUGS["half_scales"]
    assert guarded.describe_change(present=False) == (
        f"onnxruntime {guarded.installed()} no longer has docs/precision.md: "
        "the workaround in pipeline/engines/onnxruntime/session.py can go"
    )
    told = BUGS["pad_into_average_pool"].describe_change(present=True)
    assert told.startswith(f"onnxruntime {guarded.installed()} has microsoft/onnxruntime#22177 now: ")


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_what_a_case_names_exists(bug: KnownBug) -> None:
    for named in (bug.guard, "" if "#" in bug.source else bug.source):
        assert (_ROOT / named).exists(), named
    assert bool(bug.probe) == bool(bug.affected), "versions are recorded where they are probed"


def test_the_page_has_the_table_of_the_book() -> None:
    page = (_ROOT / "docs" / "prosecute.md").read_text()
    rows = [bug.row() for bug in BUGS.values()]
    assert [row for row in rows if row not in page] == [], "write these rows into docs/prosecute.md"
    assert sum(line in rows for line in page.splitlines()) == len(BUGS) >= 25
