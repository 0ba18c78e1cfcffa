"""Test what goes wrong while models are measured side by side: each has its reason, and the rest is measured."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

NETS = """
import ctypes
import os
import time
from pathlib import Path

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)

class Faulty(Net):
    # does its deed where latency is measured, after so many calls, at one batch size or at all
    def __init__(self, deed, after=0, batch=None):
        super().__init__()
        self.deed, self.after, self.batch, self.calls = deed, after, batch, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > self.after and self.batch in (None, len(x)):
            if Path(os.readlink("/proc/self/fd/2")).name.startswith("latency-"):
                self.deed()
        return self.linear(x)

class Large(Net):
    # 64 MiB for each sample
    def forward(self, x):
        return self.linear(x) + x[:, :1].expand(len(x), 16 << 20).contiguous()[:, :1]

def hang():
    time.sleep(3600)

def crash():
    ctypes.string_at(0)

def lose_the_device():
    raise RuntimeError("CUDA error: unspecified launch failure\\nCUDA kernel errors might be reported at another call")

def build():
    return Net(), torch.ones(2, 4)

def large():
    return Large(), torch.ones(2, 4)

def crashes():
    return Faulty(crash), torch.ones(2, 4)

def crashes_late():
    return Faulty(crash, after=300), torch.ones(2, 4)

def loses():
    return Faulty(lose_the_device, after=300), torch.ones(2, 4)

def hangs_at_2():
    return Faulty(hang, batch=2), torch.ones(2, 4)
"""

QUICK = ("--measure-time", "0.1s", "--threads", "1", "--no-limits", "--quiet")
LIMIT, ASKED = 100_000_000, 8 * (64 << 20)


def graph(path: Path, batch: int | str, features: int = 4) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, features])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [features, 3], np.ones(features * 3, np.float32))
    made = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    path.write_bytes(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    onnx.checker.check_model(str(path))
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NETS)
    whole = graph(tmp_path / "good.onnx", "batch")
    (tmp_path / "cut.onnx").write_bytes(whole[:60])
    graph(tmp_path / "fixed.onnx", 2)
    graph(tmp_path / "wide.onnx", "batch", features=5)
    (tmp_path / "noise.engine").write_bytes(b"noise" * 99)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(answer: Any) -> dict[str, dict[str, Any]]:
    """The records by id."""
    run = json.loads(answer.stdout)
    assert run["complete"]
    return {record["id"]: record for record in (run["baseline"], *run["variants"])}


def medians(record: dict[str, Any]) -> dict[int, bool]:
    """By batch size, whether there is one."""
    return {row["batch"]: row["p50_ms"] is not None for row in record["latency"]}


@pytest.mark.thorough
def test_each_has_its_reason_and_the_rest_is_measured(cli, folder: Path) -> None:
    faulty = ("noise.engine", "cut.onnx", "wide.onnx", "fixed.onnx")
    faulty += ("net.py:crashes", "net.py:crashes_late", "net.py:loses", "net.py:hangs_at_2")
    limits = ("--batch", "1,2", "--no-memory", "--time", "60s", "--json")
    answer = cli("benchmark", "net.py:build", *faulty, "good.onnx", *limits, *QUICK)
    assert answer.code == 0, answer.text
    assert "Traceback" not in answer.text
    found = measured(answer)
    for name in ("net-build", "good.onnx"):
        assert found[name]["status"] == "measured"
        assert medians(found[name]) == {1: True, 2: True}
    assert all(row["speedup"] or "rounds" in row["reasons"]["speedup"] for row in found["good.onnx"]["latency"])
    reasons = {
        "noise.engine": "noise.engine has no manifest|keep the manifest beside",
        "cut.onnx": "cut.onnx is truncated|copy it again",
        "wide.onnx": "x:float32:batch,5|float32[1, 4]",
        "net-crashes": "latency at batch 1|SIGSEGV",
        "net-crashes_late": "latency at batch 1|SIGSEGV",
        "net-loses": "latency at batch 1|CUDA error: unspecified launch failure",
    }
    for name, words in reasons.items():
        assert found[name]["status"] == "failed", name
        assert not any(medians(found[name]).values())
        assert [word for word in words.split("|") if word not in found[name]["reason"]] == [], found[name]["reason"]
    for name, batch, words in (("fixed.onnx", 1, "2"), ("net-hangs_at_2", 2, "ran past its time limit")):
        assert found[name]["status"] == "measured"
        assert medians(found[name]) == {1: batch != 1, 2: batch != 2}
        assert words in found[name]["reason"]


@pytest.mark.thorough
def test_a_batch_that_does_not_fit_is_a_row(cli, folder: Path) -> None:
    answer = cli("benchmark", "net.py:large", "--batch", "8", "--memory-limit", LIMIT, "--json", *QUICK)
    assert answer.code == 0, answer.text
    found = measured(answer)["net-large"]
    assert medians(found) == {1: True, 8: False}
    full, memory = found["latency"][-1], found["memory"]
    assert (memory["batch"], memory["peak_bytes"]) == (8, None)
    for row in (full, memory):
        assert (row["oom"]["asked_bytes"], row["oom"]["limit_bytes"]) == (ASKED, LIMIT)
        assert 0 < row["oom"]["free_bytes"] < LIMIT
        assert "you tried to allocate" in row["failure"]
    back = memory["oom"]["given_back"] or memory["oom"]["reasons"]["given_back"]
    assert back is True or "others have taken since" in back, "memory is the machine's, and others run beside"


@pytest.mark.thorough
def test_a_sweep_ends_where_memory_does(cli, folder: Path) -> None:
    """The baseline's does, so that what it is the measure of is measured without it."""
    limits = ("--batch", "sweep", "--shape", "batch=1:1:4", "--memory-limit", LIMIT, "--no-memory")
    answer = cli("benchmark", "net.py:large", "good.onnx", *limits, *QUICK)
    assert answer.code == 0, answer.text
    assert "net-large: the largest batch that fits is 1; batch 2 asked for 128 MiB" in answer.stdout
    assert re.search(r"good\.onnx +1 .*\n +2 .*\n +4 .*", answer.stdout), answer.stdout


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("net.py:crashes --batch 1", 1, "nothing was measured|SIGSEGV"),
        ("good.onnx --batch 0", 2, "at least 1|0 was given"),
        ("good.onnx --batch 1 --measure-time 0", 2, "--measure-time|greater than 0"),
        ("net.py:build good.onnx --batch 1 --device cuda", 4, "eager cannot run on cuda:0|install NVIDIA's driver"),
    ],
)
def test_what_cannot_be_measured_at_all(command: str, code: int, words: str, cli, folder: Path) -> None:
    answer = cli("benchmark", *QUICK, "--no-memory", *command.split())
    assert answer.code == code, answer.text
    assert [word for word in words.split("|") if word not in answer.text] == [], answer.text
    assert "Traceback" not in answer.text
