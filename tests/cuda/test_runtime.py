"""The runtime itself: what tests of this folder build on."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from .control import Control

Card = Callable[..., Control]
MIB = 1 << 20


def python(code: str) -> Any:
    """Run lines in a process of its own, which has torch at hand; the answer is what they print as JSON."""
    text = f"import json, os, torch\n{code}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_processes_share_a_cards_memory_and_give_it_back(card: Card) -> None:
    control = card(memory_mib=1024, context_mib=100)
    child = "import torch; torch.zeros(400 << 18, device='cuda'); print(torch.cuda.mem_get_info()[0]); input()"
    with subprocess.Popen([sys.executable, "-c", child], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout
        assert int(process.stdout.readline()) == (1024 - 100 - 400) * MIB
        free = python("print(json.dumps(torch.cuda.mem_get_info()[0]))")
        assert free == (1024 - 2 * 100 - 400) * MIB
        assert control.used_bytes() == {process.pid: 500 * MIB}
        process.kill()
    assert control.used_bytes() == {}


FAULTS = {
    "out_of_memory_at": ("OutOfMemoryError", "CUDA out of memory", 1),
    "sticky_at": ("AcceleratorError", "an illegal memory access was encountered", 0),
    "lost_at": ("AcceleratorError", "unknown error", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_those_of_cuda(fault: str, card: Card) -> None:
    control = card()
    tried = """
x = torch.ones(8, device="cuda")
control.write(out_of_memory_more=2, **{name: control.read(counter) + 1})
errors, worked = [], 0
for size in (1, 2, 3):
    try:
        torch.zeros(size << 23, device="cuda").cpu()
        worked += 1
    except RuntimeError as error:
        errors.append([type(error).__name__, str(error).splitlines()[0]])
print(json.dumps([errors, worked]))
"""
    counter = {"out_of_memory_at": "allocations", "sticky_at": "launches", "lost_at": "calls"}[fault]
    opened = f"import sys; sys.path.insert(0, {str(__file__).rpartition('/')[0]!r}); from control import Control\n"
    given = f"from pathlib import Path; control = Control(Path({str(control.path)!r}))\n"
    errors, worked = python(f"{opened}{given}name, counter = {fault!r}, {counter!r}\n{tried}")
    kind, words, others = FAULTS[fault]
    assert errors[0][0] == kind
    assert words in errors[0][1]
    assert (worked > 0) == bool(others)
    assert control.read("faults") == (3 if fault == "out_of_memory_at" else 1)


def test_cuda_does_not_outlive_a_fork(card: Card) -> None:
    card()
    forked = """
import ctypes
torch.zeros(1, device="cuda")
cudart = ctypes.CDLL("libcudart.so.13")
child = os.fork()
if not child:
    os._exit(cudart.cudaSetDevice(0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(forked) == 3
