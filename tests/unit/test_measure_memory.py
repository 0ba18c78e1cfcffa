"""Resident memory: the counters, on this process, and what is made of them."""

import mmap
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import MissingCapability, ModelError, StepCrashed, StepError, StepOutOfMemory
from enginesmith.pipeline.measure.memory import limits, peak, usage
from enginesmith.pipeline.measure.memory.limits import (
    describe_out_of_memory,
    explain_out_of_memory,
    largest_fit,
    run_limited,
    try_batch,
)
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.measure.memory.usage import (
    Phase,
    Resident,
    parse_smaps,
    read_phase,
    read_trimmed,
    reset_high_water,
)
from enginesmith.pipeline.measure.rows import MemoryRow, OutOfMemory
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.oom import out_of_memory, says_out_of_memory
from enginesmith.pipeline.tasks import measure

MIB = 1 << 20
SMAPS = """\
7f00-7f10 r-xp 00000000 08:01 11   /usr/lib/libtorch_cpu.so.2
Rss:                 100 kB
Anonymous:            10 kB
7f10-7f20 r--p 00000000 08:01 12   /data/weights of mine.bin
Size:                 80 kB
Rss:                  50 kB
Anonymous:             0 kB
7f14-7f18 r--p 00000000 08:01 13   /tmp/x/model/data/aotinductor/model/c.wrapper.so
Size:                 20 kB
Rss:                  20 kB
Anonymous:             0 kB
7f20-7f30 rw-p 00000000 00:00 0
Size:                 64 kB
Rss:                   7 kB
Anonymous:             5 kB
7f30-7f40 rw-p 00000000 00:00 0    [heap]
Rss:                   3 kB
Anonymous:             3 kB
"""


def test_smaps_are_split_by_what_is_mapped() -> None:
    found = parse_smaps(SMAPS.splitlines(keepends=True))
    assert found == Resident((10 + 7 + 3) * 1024, mapped_data=70 * 1024, libraries=90 * 1024, unread=30 * 1024)
    assert found.counted == 90 * 1024


def test_peak_of_a_phase_is_what_was_live_at_once() -> None:
    def pages(size: int) -> mmap.mmap:  # not from malloc, which may keep what is freed, and have holes to fill
        block = mmap.mmap(-1, size)
        np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE] = 1
        return block

    base = read_trimmed()
    reset_high_water()
    pages(64 * MIB).close()
    second = pages(40 * MIB)
    found = read_phase()
    assert found.peak - base.counted == pytest.approx(64 * MIB, rel=0.03)
    assert found.end.counted - base.counted == pytest.approx(40 * MIB, rel=0.03)
    reset_high_water()
    assert read_phase().peak - base.counted == pytest.approx(40 * MIB, rel=0.03)
    second.close()


def test_mapped_data_counts_once_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8 * MIB))
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = read_trimmed()
        assert not any(mapped[:: mmap.PAGESIZE])
        assert read_trimmed().mapped_data - before.mapped_data == 8 * MIB


def test_kernel_that_does_not_reset_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str, encoding: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(usage.Path, "write_text", refuse)
    with pytest.raises(MissingCapability, match="Permission denied"):
        reset_high_water()


def phases() -> peak.ResidentPhases:
    """Weights: 10 written and 90 mapped at the first call; 40 of activations; loading peaks at 30."""
    base = Resident(200 * MIB, 0, 30 * MIB)
    load = Phase(Resident(215 * MIB, 0, 31 * MIB), peak=230 * MIB, process_peak=261 * MIB)
    held = Resident(210 * MIB, 0, 31 * MIB)
    first = Phase(Resident(240 * MIB, 90 * MIB, 40 * MIB), peak=330 * MIB, process_peak=370 * MIB)
    steady = Phase(Resident(250 * MIB, 90 * MIB, 40 * MIB), peak=340 * MIB, process_peak=380 * MIB)
    return peak.ResidentPhases(base, load, held, first, steady)


def test_weights_that_are_mapped_later_are_weights() -> None:
    row = MemoryRow(device="cpu", batch=8, **phases().summarize())
    assert (row.weights_bytes, row.activation_bytes, row.peak_bytes) == (100 * MIB, 40 * MIB, 140 * MIB)
    assert (row.host_peak_bytes, row.lenses["load_peak"].bytes) == (380 * MIB, 30 * MIB)
    assert row.lenses["mapped_files"].bytes == 90 * MIB
    assert all(lens.source and lens.note for lens in row.lenses.values())


def test_rows_of_a_mapped_embedding_that_no_call_has_read_count() -> None:
    seen = phases()
    end = replace(seen.steady.end, unread=60 * MIB)
    row = replace(seen, base=replace(seen.base, unread=10 * MIB), steady=replace(seen.steady, end=end)).summarize()
    assert (row["weights_bytes"], row["activation_bytes"], row["peak_bytes"]) == (150 * MIB, 40 * MIB, 190 * MIB)
    assert (row["lenses"]["mapped_files"].bytes, row["lenses"]["unread_files"].bytes) == (140 * MIB, 50 * MIB)


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

    monkeypatch.setattr(peak, "run_limited", fail)
    row = measure_memory(candidate, 4, {}, tmp_path, lambda text: None)
    assert row.peak_bytes is None
    assert str(error) in row.reasons["peak_bytes"]
    assert (row.failure is None) == isinstance(error, MissingCapability)
    monkeypatch.setattr(measure, "measured_feeds", lambda reference: {4: {}})
    task = measure.Memory.model_construct(variant="eager", engine=Eager(), device=Device())
    effect = task.run({"reference": candidate.artifact, "model": candidate.artifact}, tmp_path, lambda text: None)
    assert effect.summary == f"no peak at batch 4: {row.reasons['peak_bytes']}", "a reason is no figure"


CPU, CUDA = Device(), Device(kind="cuda")
MEBIBYTE = 1 << 20
LIMIT = 64 * MEBIBYTE


def in_a_process(code: str) -> str:
    """Return what a fresh process prints that has imported what these lines need."""
    before = (
        "import mmap\n"
        "from enginesmith.pipeline.engines.base import Device\n"
        "from enginesmith.pipeline.errors import *\n"
        "from enginesmith.pipeline.measure.memory.limits import *\n"
    )
    done = subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_a_limit_is_on_what_is_taken_from_here_on() -> None:
    said = in_a_process(
        f"""
set_memory_limit({LIMIT}, Device())
try:
    with explain_out_of_memory(Device()):
        kept = bytearray({LIMIT // 2})
        bytearray({LIMIT})
except StepOutOfMemory as error:
    print(error.message, error.asked_bytes, error.free_bytes)
bytearray({4 * LIMIT})
print("the limit is over")
"""
    )
    message, over = said.splitlines()
    assert message.startswith("memory ran out")
    asked, free = message.split()[-2:]
    assert asked == "None"  # Python's MemoryError does not tell
    assert LIMIT // 4 < int(free) <= LIMIT // 2
    assert over == "the limit is over"


def test_a_limit_counts_what_is_mapped_too() -> None:
    taking = f"try:\n    mmap.mmap(-1, {2 * LIMIT})\nexcept OSError as error:\n    print(error.errno)"
    assert in_a_process(f"set_memory_limit({LIMIT}, Device())\n{taking}") == "12"


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(ValueError, match="of another kind"), explain_out_of_memory(CPU):
        raise ValueError("of another kind")


@pytest.mark.parametrize(("left", "told"), [(100, 100), (5000, None)])
def test_what_was_free_is_told_where_it_can_be_believed(left: int, told: int | None, monkeypatch: Any) -> None:
    """More free than was asked for: the libraries had let go of some before it could be read."""
    monkeypatch.setattr(limits, "_read_free", lambda device: left)
    monkeypatch.setattr(limits, "release", lambda: None)
    with pytest.raises(StepOutOfMemory) as caught, explain_out_of_memory(CPU):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    assert (caught.value.asked_bytes, caught.value.free_bytes) == (4096, told)


def test_the_bytes_come_through_a_pipe() -> None:
    error = pickle.loads(pickle.dumps(StepOutOfMemory("no memory", "less", asked_bytes=7, free_bytes=3)))
    assert (error.message, error.remedy, error.asked_bytes, error.free_bytes) == ("no memory", "less", 7, 3)


def test_how_near_a_process_comes_to_its_limit_is_seen_from_outside() -> None:
    code = f"set_memory_limit({LIMIT}, Device())\nkept = bytearray({LIMIT // 2})\nprint('took', flush=True)\ninput()"
    start = (
        "from enginesmith.pipeline.engines.base import Device\n"
        "from enginesmith.pipeline.measure.memory.limits import *\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline().strip() == "took"
        monitor = limits.HeadroomMonitor()
        monitor.start(process)  # type: ignore[arg-type]
        deadline = time.monotonic() + 10
        while monitor.gap is None and time.monotonic() < deadline:
            time.sleep(0.001)
        monitor.stop()
        process.communicate("\n")
    assert monitor.gap is not None
    assert LIMIT // 4 < monitor.gap <= LIMIT // 2


def used(*numbers: int | None) -> Callable[[Device], tuple[int | None, str]]:
    """Answers of ``used_bytes``, one after another; the last one stays."""
    left = list(numbers)

    def answer(device: Device) -> tuple[int | None, str]:
        found = left.pop(0) if len(left) > 1 else left[0]
        return found, "" if found is not None else "NVML is not there"

    return answer


TORCH = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 24.00 GiB of which 23.71 GiB is free. "
    "40.00 MiB allowed; Of the allocated memory 16.00 MiB is allocated by PyTorch, and 2.00 MiB is reserved by PyTorch"
)
ARENA = "bfc_arena.cc:360 AllocateRawInternal Available memory of 12 is smaller than requested bytes of 34"


@pytest.mark.parametrize(
    ("text", "asked", "free", "whole_segments"),
    [
        (ARENA, 34, 12, False),
        (TORCH.format("20.00 MiB"), 20 << 20, 22 << 20, True),
        (TORCH.format("42.00 MiB"), 42 << 20, 22 << 20, False),
        ("Failed to allocate memory for requested buffer of size 77", 77, None, False),
        ("Failed to allocate 1048576000 bytes of memory", 1048576000, None, False),
        ("CUDAExternalAllocator::Alloc(size_t) p != nullptr was false.", None, None, False),
    ],
)
def test_allocators_say_what_was_asked_for_and_free(
    text: str, asked: int | None, free: int | None, whole_segments: bool
) -> None:
    assert says_out_of_memory(text)
    error = out_of_memory(text)
    assert "memory" in error.message.lower()
    assert ("--memory-limit" in error.remedy) == ("allowed" in text)
    assert (error.asked_bytes, error.free_bytes) == (asked, free)
    assert ("20 MiB for blocks from 1 MiB" in error.message) == whole_segments


def test_a_limit_is_told_beside_what_torch_had_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_taken_before", {0: 32 << 20})
    monkeypatch.setattr(cuda_allocator, "_limits", {0: 8 << 20})
    with pytest.raises(StepOutOfMemory) as caught, explain_out_of_memory(CUDA):
        raise RuntimeError(TORCH.format("42.00 MiB"))
    assert "asked for 42 MiB, and 22 MiB of the 40 MiB that it may take is left" in caught.value.message
    assert "It may take 40 MiB: --memory-limit 8 MiB, and 32 MiB that PyTorch had" in caught.value.message


class TestOutcome:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let time pass by sleeping alone, at once."""
        slept = [0.0]
        clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
        monkeypatch.setattr(limits, "time", clock)

    def test_what_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "used_bytes", used(900, 500, 205))
        error = StepOutOfMemory("tried 70", "less", asked_bytes=70, free_bytes=30)
        assert describe_out_of_memory(error, 204, CUDA, 100) == OutOfMemory(
            message="tried 70",
            asked_bytes=70,
            free_bytes=30,
            limit_bytes=100,
            used_before_bytes=204,
            used_after_bytes=205,
            given_back=True,
        )

    def test_what_does_not_come_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "used_bytes", used(900, 310, 320))
        found = describe_out_of_memory(StepOutOfMemory("full"), 300, CUDA, 100)
        assert (found.used_after_bytes, found.given_back) == (310, False)
        assert "others have taken" in found.reasons["given_back"]

    def test_every_none_has_its_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "used_bytes", used(None))
        found = describe_out_of_memory(StepOutOfMemory("full"), None, CUDA, None)
        missing = {name for name, value in found if value is None}
        assert missing == set(found.reasons) == set(OutOfMemory.model_fields) - {"message", "reasons"}
        assert found.reasons["given_back"] == "NVML is not there"


class TestRunHeld:
    """``workers.run`` is made up: it raises, and writes a log."""

    @pytest.fixture
    def held(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
        monkeypatch.setattr(limits, "used_bytes", used(100))

        def call(
            ends: StepError | ModelError | int,
            said: str = "",
            gap: int | None = None,
            limit: int | None = LIMIT,
        ) -> Any:
            log = tmp_path / "session.log"
            log.write_text("std::bad_alloc, of an earlier process\n")

            def run(function: Callable[..., Any], *args: Any, on_start: Any = None, **options: Any) -> Any:
                if function is limits._nothing:
                    return None
                monkeypatch.setattr(limits.HeadroomMonitor, "gap", gap, raising=False)
                with log.open("a") as stream:
                    stream.write(said)
                if isinstance(ends, Exception):
                    raise ends
                return ends

            monkeypatch.setattr(limits, "run", run)
            monkeypatch.setattr(limits.HeadroomMonitor, "__init__", lambda self: None)
            monkeypatch.setattr(limits.HeadroomMonitor, "stop", lambda self: None)
            return run_limited(print, device=CPU, log=log, limit_bytes=limit)

        return call

    def test_memory_that_ran_out_is_an_answer(self, held: Callable[..., Any]) -> None:
        found = held(StepOutOfMemory("tried", asked_bytes=9, free_bytes=1))
        assert (found.message, found.asked_bytes, found.free_bytes, found.limit_bytes) == ("tried", 9, 1, LIMIT)
        assert found.given_back

    @pytest.mark.parametrize(
        ("said", "gap", "words"),
        [
            ("what():  std::bad_alloc", None, "an allocation failed"),
            ("MemoryError", 10 * LIMIT, "an allocation failed"),
            ("libgomp: Thread creation failed", 8 * MEBIBYTE, "a thread's stack"),
            ("", 3 * MEBIBYTE, f"{3 * MEBIBYTE} bytes left"),
        ],
    )
    def test_a_crash_at_the_limit_is_it(self, held: Callable[..., Any], said: str, gap: int | None, words: str) -> None:
        found = held(StepCrashed("its process crashed (SIGABRT)"), said, gap)
        assert words in found.message
        assert "SIGABRT" in found.message

    @pytest.mark.parametrize(
        ("said", "gap", "limit"),
        [
            ("", 40 * MEBIBYTE, LIMIT),
            ("", None, LIMIT),
            ("Thread creation failed", 40 * MEBIBYTE, LIMIT),
            ("", 0, None),
        ],
    )
    def test_a_crash_far_from_it(self, held: Callable[..., Any], said: str, gap: int | None, limit: int | None) -> None:
        with pytest.raises(StepCrashed):
            held(StepCrashed("its process crashed (SIGSEGV)"), said, gap, limit)


@pytest.mark.parametrize(
    ("room", "start", "over", "found"),
    [(11, 8, 16, 11), (0, 0, 1, 0), (0, 0, 64, 0), (63, 0, 64, 62), (1, 1, 2, 1), (1000, 512, 1024, 992)],
)
def test_the_largest_that_fits(room: int, start: int, over: int, found: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= room

    assert largest_fit(fits, start, over) == found
    assert all(start < batch < over for batch in tried)
    assert len(tried) <= 7


def test_a_batch_is_tried_in_a_process_held_to_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[object] = []

    class Engine:
        def prime(self, artifact: Artifact, device: Device) -> None:
            order.append("prime")

        def load(self, artifact: Artifact, device: Device) -> "Engine":
            order.append("load")
            return self

        def __enter__(self) -> "Engine":
            return self

        def __exit__(self, *error: object) -> None:
            order.append("close")

        def run(self, feeds: Any) -> None:
            order.append(feeds)

    candidate = Candidate("net", Engine(), Artifact(kind="torch", path=tmp_path, sha256="", bytes=0), CPU)  # type: ignore[arg-type]
    monkeypatch.setattr(limits, "set_memory_limit", lambda limit, device: order.append(limit))
    monkeypatch.setattr(limits, "run_limited", lambda function, *args, device, log, limit_bytes: function(*args, print))
    assert try_batch(candidate, {}, tmp_path, LIMIT) is None
    assert order == ["prime", LIMIT, "load", {}, "close"]


def test_what_one_process_alone_has_is_not_counted_besides() -> None:
    code = f"kept = bytearray(b'x' * {LIMIT})\nprint('took', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        process.stdout.readline()
        own, why = usage.read_own_bytes(CPU, process.pid)
        process.communicate("\n")
    assert own is not None
    assert LIMIT <= own < 2 * LIMIT
    assert why == ""
    assert usage.read_own_bytes(CPU, process.pid) == (0, "")


def test_what_is_in_use_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "used_bytes", used(100, 100, None, 5))
    own = iter([(30, ""), (None, "no such process listed"), (1, ""), (9, "")])
    monkeypatch.setattr(usage, "read_own_bytes", lambda device, process: next(own))
    assert usage.used_besides(CUDA, 1) == (70, "")
    assert usage.used_besides(CUDA, 1) == (None, "no such process listed")
    assert usage.used_besides(CUDA, 1) == (None, "NVML is not there")
    assert usage.used_besides(CUDA, 1) == (0, "")
