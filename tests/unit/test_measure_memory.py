"""Resident memory: the counters, on this process, and what is made of them."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import MissingCapability, StepCrashed
from enginesmith.pipeline.measure.latency.candidate import Candidate
from enginesmith.pipeline.measure.memory import peak, rss
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.measure.memory.rss import Phase, Resident, parse_smaps, phase, trimmed
from enginesmith.pipeline.system.device import Device

MIB = 1 << 20
SMAPS = """\
7f00-7f10 r-xp 00000000 08:01 11   /usr/lib/libtorch_cpu.so.2
Rss:                 100 kB
Anonymous:            10 kB
7f10-7f20 r--p 00000000 08:01 12   /data/weights of mine.bin
Rss:                  50 kB
Anonymous:             0 kB
7f20-7f30 rw-p 00000000 00:00 0
Rss:                   7 kB
Anonymous:             5 kB
7f30-7f40 rw-p 00000000 00:00 0    [heap]
Rss:                   3 kB
Anonymous:             3 kB
"""


def test_smaps_are_split_by_what_is_mapped() -> None:
    found = parse_smaps(SMAPS.splitlines(keepends=True))
    assert found == Resident(written=(10 + 7 + 3) * 1024, mapped_data=50 * 1024, libraries=90 * 1024)
    assert found.counted == 70 * 1024


def test_peak_of_a_phase_is_what_was_live_at_once() -> None:
    def pages(size: int) -> mmap.mmap:  # not from malloc, which may keep what is freed, and have holes to fill
        block = mmap.mmap(-1, size)
        np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE] = 1
        return block

    base = trimmed()
    with phase() as found:
        pages(64 * MIB).close()
        second = pages(40 * MIB)
    assert found.peak - base.counted == pytest.approx(64 * MIB, rel=0.03)
    assert found.end.counted - base.counted == pytest.approx(40 * MIB, rel=0.03)
    with phase() as later:
        pass
    assert later.peak - base.counted == pytest.approx(40 * MIB, rel=0.03)
    second.close()


def test_mapped_data_counts_once_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8 * MIB))
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = trimmed()
        assert not any(mapped[:: mmap.PAGESIZE])
        assert trimmed().mapped_data - before.mapped_data == 8 * MIB


def test_kernel_that_does_not_reset_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rss.Path, "write_text", refuse)
    with pytest.raises(MissingCapability, match="Permission denied"), phase():
        pass


def phases() -> peak._Phases:
    """Weights: 10 written and 90 mapped at the first call; 40 of activations; loading peaks at 30."""
    base = Resident(200 * MIB, 0, 30 * MIB)
    load = Phase(Resident(215 * MIB, 0, 31 * MIB), peak=230 * MIB, process_peak=261 * MIB)
    held = Resident(210 * MIB, 0, 31 * MIB)
    first = Phase(Resident(240 * MIB, 90 * MIB, 40 * MIB), peak=330 * MIB, process_peak=370 * MIB)
    steady = Phase(Resident(250 * MIB, 90 * MIB, 40 * MIB), peak=340 * MIB, process_peak=380 * MIB)
    return peak._Phases(base, load, held, first, steady)


def test_weights_that_are_mapped_later_are_weights() -> None:
    row = phases().row("cpu", 8)
    assert (row.weights_bytes, row.activation_bytes, row.peak_bytes) == (100 * MIB, 40 * MIB, 140 * MIB)
    assert row.host_peak_bytes == 380 * MIB
    assert row.lenses["load_peak"].bytes == 30 * MIB
    assert row.lenses["mapped_files"].bytes == 90 * MIB
    assert all(lens.source and lens.note for lens in row.lenses.values())


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    artifact = Artifact(kind="torch", path=tmp_path, sha256="", bytes=0)
    return Candidate("eager", None, artifact, Device())  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [StepCrashed("it was killed"), MissingCapability("no counters here")])
def test_what_cannot_be_measured_has_a_reason(
    candidate: Candidate, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(peak, "run_held", fail)
    row = measure_memory(candidate, 4, {}, tmp_path, lambda text: None)
    assert row.peak_bytes is None
    assert str(error) in row.reasons["peak_bytes"]
    assert (row.failure is None) == isinstance(error, MissingCapability)
