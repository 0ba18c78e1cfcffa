"""The GPU lane's own logic, in a dry run on the CPU: every variant is measured, or refused in words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "benchmarks" / "gpu"
NEEDS_CUDA = {"eager-tf32", "eager-graphs", "eager-fp16-graphs", "onnxruntime-tf32"}
MEASURED = {"eager", "eager-fp16", "eager-bf16", "onnxruntime-fp32", "onnxruntime-fp16"}
"""Not those of torch.compile, whose compilations take longer than all the rest."""
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the script in this process; what it left."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("ENGINESMITH_STORE", str(store))
    import bench

    def run(*arguments: str) -> dict[str, Any]:
        out = tmp_path / "gpu_lane.json"
        short = ("--seconds", "0.1", "--threads", "1")
        bench.main(["digits", "--batch", "1", "2", *short, "--out", str(out), *arguments])
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return run


@pytest.mark.thorough
def test_each_variant_is_measured_or_refused_in_words(bench: Bench) -> None:
    record = bench("--device", "cpu", "--only", "eager", "onnxruntime")
    assert record["machine"]["versions"]["torch"]
    part = record["models"]["digits"]
    assert part["complete"]
    assert set(part["refused"]) == {"tensorrt", "tensorrt_rtx"}
    measured = set()
    for name, found in part["variants"].items():
        if "refused" in found:
            assert len(found["refused"].split()) > 3, name
            continue
        measured.add(name)
        assert [found["latency"][batch]["batch"] for batch in ("1", "2")] == [1, 2]
        for row in found["latency"].values():
            assert row["failure"] is None
            assert row["p50_ms"] > 0
            assert row["speedup"] or row["reasons"]["speedup"]  # on a busy machine there are few rounds
        assert found["memory"]["peak_bytes"] > 0
        assert found["memory"]["lenses"]
        assert name == "eager" or all(point["passed"] for point in found["fidelity"])
    assert measured == MEASURED
    assert all("CUDA" in part["variants"][name]["refused"] for name in NEEDS_CUDA)
    assert part["variants"]["eager-fp16"]["options"] == {"dtype": "float16"}


def test_a_lane_without_a_device_says_so(bench: Bench) -> None:
    from enginesmith.pipeline.system import nvidia

    if nvidia.driver().devices:
        pytest.skip("this machine has a CUDA device")
    assert "no CUDA device" in bench()["models"]["digits"]["skipped"]


@pytest.mark.thorough
def test_what_there_is_no_time_for_is_said(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "empty"))  # where nothing is made yet
    part = bench("--device", "cpu", "--minutes", "0")["models"]["digits"]
    assert not part["complete"]
    assert "no baseline" in part["failure"]
    assert all("time" in found["refused"] for name, found in part["variants"].items() if name in MEASURED - {"eager"})


def test_parts_of_several_calls_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import record

    first, second = tmp_path / "1.json", tmp_path / "2.json"
    one = record.Record(first)
    one.start("models", "a").update(complete=True)
    one.start("tests")
    one.write()
    again = record.Record(first)
    again.start("models", "b")
    assert again.content["models"] == {"a": {"complete": True}, "b": {"complete": False}}
    record.Record(second).start("models", "a")
    found = record.merged([first, second])
    assert found["models"] == {"a": {"complete": False}, "b": {"complete": False}}
    assert found["tests"] == {"complete": False}


def test_trtexec_is_given_an_engine_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import commands

    for name in ("tensorrt_rtx", "tensorrt"):
        (tmp_path / "digits" / name).mkdir(parents=True)
        (tmp_path / "digits" / name / "model.engine").touch()
        (tmp_path / "digits" / name / "model.engine.json").write_text(json.dumps({"engine": name}))
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: iter(sorted(self.glob(f"*/{pattern}"), reverse=True)))
    ran: dict[str, tuple[str, ...]] = {}

    class Lane:
        record: ClassVar[dict[str, Any]] = {"models": {"digits": {}}}

        def note(self, place: dict[str, Any], name: str, *command: str) -> bool:
            ran[name] = command
            return True

    monkeypatch.setattr(commands.shutil, "which", lambda name: name)
    commands.optimize(Lane(), "digits", ["tensorrt"], "1s", tmp_path)
    assert ran["trtexec"][-1] == f"--loadEngine={tmp_path / 'digits' / 'tensorrt' / 'model.engine'}"
    assert "onnxruntime_perf_test" not in ran
