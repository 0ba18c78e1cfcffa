"""Runs that a gate judges, and the command line that judges them."""

from pathlib import Path

from click.testing import CliRunner

from enginesmith import cli
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.results import run as documents
from enginesmith.pipeline.results.gate import Demands
from enginesmith.pipeline.results.gate_report import Gate
from enginesmith.pipeline.results.run import ModelRecord, StoredArtifact, VariantRecord
from runs import small, variant

MACHINE = {"processor": "A", "usable_cores": 2, "architecture": "x86_64"}
MODEL = ModelRecord(source="digits", sha256="0" * 64, signature=None, data="digits")


def interval(median: float, half: float = 0.01) -> Interval:
    return Interval(median=median, low=median * (1 - half), high=median * (1 + half))


def record(name: str = "a", p50_ms: float = 1.0, half: float = 0.01, **changes: object) -> VariantRecord:
    row = LatencyRow(
        batch=1, p50_ms=p50_ms, median_ms=interval(p50_ms, half), speedup=interval(10 / p50_ms, half), launches=5
    )
    memory = MemoryRow(device="cpu", batch=1, peak_bytes=10 << 20)
    stored = StoredArtifact(path="variants/a/model.onnx", sha256=f"{p50_ms}", bytes=1000)
    return variant(name, **{"latency": (row,), "memory": memory, "artifact": stored, **changes})


def write(folder: Path, *variants: VariantRecord, **changes: object) -> Path:
    eager = record("eager", 10.0, artifact=None, engine="eager")
    winner = variants[0].id if variants else None
    values = {"name": folder.name, "environment": MACHINE, "model": MODEL, "winner": winner, **changes}
    folder.mkdir(exist_ok=True)
    documents.write(small(eager, *variants, **values), folder)
    return folder


def judged(found: Gate) -> dict[str, bool]:
    return {one.name: one.passed for one in found.verdicts}


def demands(**budgets: float) -> Demands:
    return Demands(budgets=Budgets.model_validate(budgets), measure=False)


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, list(words))
    return done.exit_code, done.output
