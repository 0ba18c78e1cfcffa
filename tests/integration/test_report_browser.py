"""report.html in a browser: headless Chromium opens the page, and what it made of it is judged."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fleets
import runs
from enginesmith.pipeline.report import fleet
from enginesmith.pipeline.report.html import page
from enginesmith.pipeline.results import run as documents
from enginesmith.pipeline.results.fleet import FleetRecord

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
)
EVIL = """<img src=x onerror="console.error('a')"></script><script>console.error('b')</script>"><svg onload=x()>'${d}"""

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")]


class Shown(HTMLParser):
    """A page as the browser left it: its elements, the charts that are in sight, and what is said on the console."""

    def __init__(self, dom: str, console: list[str]) -> None:
        super().__init__()
        self.console = console
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.charts: dict[str, bool] = {}
        """Those that are not folded away, and whether there is an SVG with a text alternative in each."""
        self._folded: list[bool] = []
        self._chart = ""
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag == "details":
            self._folded.append("open" not in attributes)
        if (name := attributes.get("data-chart")) is not None:
            self._chart = "" if any(self._folded) else name
            if self._chart:
                self.charts[name] = False
        if tag == "svg" and self._chart and attributes.get("role") == "img" and attributes.get("aria-label"):
            self.charts[self._chart] = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "details":
            self._folded.pop()
        if tag == "figure":
            self._chart = ""

    @property
    def root(self) -> dict[str, str | None]:
        """Attributes of the root element, where the page says how far it has come."""
        return next(attributes for tag, attributes in self.elements if tag == "html")


@dataclass(frozen=True)
class Browser:
    """Opens pages, each in a browser of its own."""

    folder: Path

    def open(self, path: Path, *, wait: bool = True, width: int = 1280) -> Shown:
        """The page when it is loaded; ``wait`` gives it time of its own for what it does afterwards."""
        assert CHROMIUM is not None
        flags = [*FLAGS, f"--window-size={width},900", f"--user-data-dir={self.folder / 'user'}"]
        flags += ["--virtual-time-budget=10000"] if wait else []
        done = subprocess.run(
            [CHROMIUM, *flags, "--dump-dom", path.as_uri()], capture_output=True, check=True, timeout=120
        )
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
        return Shown(done.stdout.decode(), said)


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


def test_a_real_run_is_shown_with_all_its_numbers_and_charts(digits_run: Path, browser: Browser) -> None:
    files = {one.name for one in digits_run.iterdir()}
    assert {"report.html", "report.md", "junit.xml", "samples.npz", "run.json"} <= files
    shown = browser.open(digits_run / "report.html")
    assert not shown.console
    assert {"pareto", "memory", "latency-by-batch", "fidelity"} <= shown.charts.keys()
    assert all(shown.charts.values()), shown.charts
    assert shown.root["data-drawn"] == str(len(shown.charts))
    run = documents.read(digits_run)
    values = {float(str(one["data-value"])) for tag, one in shown.elements if tag == "td" and "data-value" in one}
    for record in (run.baseline, *run.variants):
        assert record.peak_bytes in values
        for row in record.latency:
            known = {row.p50_ms, row.p90_ms, row.p99_ms, row.speedup and row.speedup.median, row.rounds}
            assert known - {None} <= values


def test_texts_of_a_run_stay_texts_on_a_small_phone(browser: Browser, tmp_path: Path) -> None:
    found = touched(page.render(runs.run(EVIL * 2, count=50)), browser, tmp_path)
    assert found["buttons"] > 20
    assert found["inputs"] > 2


@pytest.mark.thorough
def test_texts_of_a_fleet_do_too(browser: Browser, tmp_path: Path) -> None:
    values = runs.filled(FleetRecord, EVIL)
    entries = [{**values["entries"][0], "model": f"{number}{EVIL}", "target": EVIL} for number in range(60)]
    record = FleetRecord.model_validate({**values, "fleet": fleets.fleet(), "entries": entries})
    found = touched(fleet.render(record), browser, tmp_path)
    assert found["buttons"] > 10
    assert found["inputs"] > 0


def _allow_scripts(text: str) -> str:
    allowed = "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    return re.sub(r"(?<=content=\")default-src [^\"]*", allowed, text, count=1)


def touched(text: str, browser: Browser, tmp_path: Path) -> dict[str, int]:
    """In a frame as wide as the smallest phone, everything is opened, sorted and searched; counts of what is found."""
    probe = """<script>addEventListener("load", () => setTimeout(() => {
      for (const one of document.querySelectorAll("details")) one.open = true;
      setTimeout(() => {
        for (const one of document.querySelectorAll("th button, .tools button")) one.click();
        for (const one of document.querySelectorAll("input")) {
          one.value = "img";
          one.dispatchEvent(new Event("input"));
        }
        const handlers = [...document.querySelectorAll("*")].filter((one) => one.onerror || one.onload).length;
        parent.postMessage({
          wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
          images: document.querySelectorAll("img, svg[onload]").length, handlers,
          buttons: document.querySelectorAll("th button").length,
          inputs: document.querySelectorAll("input").length,
          waiting: document.querySelectorAll("[data-chart]:not([data-drawn])").length,
          undrawn: [...document.querySelectorAll("[data-chart]")].filter((one) => !one.querySelector("svg")).length,
        }, "*");
      }, 3000);
    }, 1000))</script>"""
    (tmp_path / "page.html").write_text(_allow_scripts(text).replace("</body>", f"{probe}</body>"))
    (tmp_path / "frame.html").write_text(
        "<!DOCTYPE html><html><body><iframe src='page.html' style='width:320px;height:700px'></iframe><script>"
        "addEventListener('message', (one) => { document.documentElement.dataset.found = JSON.stringify(one.data); })"
        "</script></body></html>"
    )
    shown = browser.open(tmp_path / "frame.html")
    assert not shown.console
    found: dict[str, int] = json.loads(str(shown.root["data-found"]))
    assert {found[name] for name in ("wide", "images", "handlers", "waiting", "undrawn")} == {0}
    return found


def test_the_table_of_variants_fits_and_breaks_no_interval(browser: Browser, tmp_path: Path) -> None:
    """At a width of 1300 pixels, where lines break before intervals; texts, and so what is copied, stay as they are."""
    probe = """<script>addEventListener("load", () => {
      for (const one of document.querySelectorAll("details")) one.open = true;
      setTimeout(() => {
        const box = document.querySelector("[data-name=variants] .scroll");
        const heads = [...box.querySelectorAll("th button")];
        const wholes = [...document.querySelectorAll(".whole")];
        heads[2].click();
        document.documentElement.dataset.found = JSON.stringify({
          beyond: box.scrollWidth - box.clientWidth,
          broken: wholes.filter((one) => one.getClientRects().length !== 1).length,
          heads: [heads[2].textContent, heads.at(-2).textContent],
          rows: [...box.querySelectorAll("tbody tr")].map((one) => [...one.cells].map((cell) => cell.textContent)),
          drawn: [...document.querySelectorAll("[data-long] td:has(.whole)")].map((one) => one.textContent),
        });
      }, 500);
    })</script>"""
    drop = {"metric": "top1", "value": 1, "baseline": 1, "drop": 0, "drop_low": -0.0153, "drop_high": 0.0153}
    records = [
        runs.variant(
            f"onnxruntime-int8-{number}",
            latency=[_measure(0.0418, median=number, low=number - 0.26, high=number + 0.19)],
            quality={**drop, "samples": 179},
            peak_bytes=1012 << 10,
            artifact={"bytes": 691 << 10, "path": "x", "sha256": "0", "kind": "engine"},
        )
        for number in range(59, 11, -1)
    ]
    run = runs.small(runs.variant("eager", latency=[_measure(0.692)]), *records, winner=records[0].id)
    (tmp_path / "page.html").write_text(_allow_scripts(page.render(run)).replace("</body>", f"{probe}</body>"))
    shown = browser.open(tmp_path / "page.html", width=1300)
    assert not shown.console
    found = json.loads(str(shown.root["data-found"]))
    assert found["beyond"] == found["broken"] == 0
    assert found["heads"] == ["speed-up [95 %]", "drop [95 %]"]
    sorted_texts = [f"{number}.00× [{number - 0.26:.2f}, {number + 0.19:.2f}]" for number in range(12, 60)]
    assert [row[2] for row in found["rows"]] == [*sorted_texts, "reference"]
    assert {row[-2] for row in found["rows"]} == {"+0.0000 [−0.0153, +0.0153]", "–"}
    assert found["drawn"][:2] == ["59.00× [58.74, 59.19]", "58.00× [57.74, 58.19]"]
    assert len(found["drawn"]) >= len(records), "rows that the page draws itself are split, too"


def _measure(p50_ms: float, **speedup: float) -> dict[str, Any]:
    return {"batch": 1, "p50_ms": p50_ms, "p99_ms": 2 * p50_ms, "speedup": speedup or None}


@pytest.mark.thorough
def test_a_large_run_opens(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page.render(runs.large()))
    assert path.stat().st_size < 10_000_000
    shown = browser.open(path, wait=False)
    assert not shown.console
    assert int(str(shown.root["data-ready"])) > 0
