"""Bad input, through the command line: one clear message, the right exit code, nothing half-written."""

import errno
import fcntl
import importlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.pipeline.artifact import file_digest, files_below, folder_digest
from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.store.store import Store

Make = Callable[[Path], object]
Patch = Callable[[Path, pytest.MonkeyPatch], object]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)

def build():
    return Net(), torch.ones(2, 4)

def bare():
    return Net()

def named():
    return Net(), {"x": torch.ones(2, 4)}
"""

FAULTY = """
import torch
from torch import nn

class Fixed(nn.Module):
    def forward(self, x):
        return x.reshape(2, 4) * 2

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(x)  # takes five

class Deaf(nn.Module):
    def forward(self, x):
        return "words"

def raises():
    raise ValueError("no weights today")  # raises here

def nothing():
    pass

def state_dict():
    return nn.Linear(2, 2).state_dict()

def broken():
    return Broken(), torch.ones(2, 4)

def deaf():
    return Deaf(), torch.ones(2, 4)

def fixed():
    return Fixed(), torch.ones(2, 4)

def leaves():
    raise SystemExit("called exit")
"""

UNEXPORTABLE = """
import torch
from torch import nn

@torch.library.custom_op("acme::wobble", mutates_args=())
def wobble(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() + 1)

@wobble.register_fake
def _(x):
    return torch.empty_like(x)

class Net(nn.Module):
    def forward(self, x):
        return torch.ops.acme.wobble(x)  # no translation

class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # depends on the values
            return wobble(x)
        return x * 2

def custom():
    return Net(), torch.ones(2, 4)

def branches():
    return Branches(), torch.ones(2, 4)
"""

PICKLED = """
import pickle
import torch

def build():
    return pickle.loads(b"cnet\\nNet\\n(tR."), torch.ones(2, 4)  # net.Net() as a pickle
"""

METRICS = """
def odd(outputs, labels):
    raise RuntimeError("the metric is out of order")
"""


QUICK = (
    "engines: [onnxruntime]\nmeasure: {latency: false, memory: false}\nbatch: [2]\nexport: {exporter: torchscript}\n"
)

FILES = {
    "net.py": NET,
    "faulty.py": FAULTY,
    "odd.py": UNEXPORTABLE,
    "pickled.py": PICKLED,
    "m.py": METRICS,
    "quick.yaml": QUICK,
}
"""What lies in the folder of every case."""


def at(name: str, marker: str) -> str:
    """``file:line`` of the line with a marker."""
    lines = FILES[name].splitlines()
    return f"{name}:{next(number for number, line in enumerate(lines, 1) if marker in line)}"


def file(name: str, content: str | bytes) -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def empty(name: str) -> Make:
    return lambda folder: (folder / name).mkdir()


def graph(weight: onnx.TensorProto, opset: int = 17) -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    made = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(model.SerializeToString())


ONNX = graph(helper.make_tensor("w", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0]))
NOISE, GIVEN = np.random.default_rng(0).bytes(999), file("m.onnx", ONNX)
FUTURE = graph(helper.make_tensor("w", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0]), opset=99)


def external(location: str, folder: str = ".") -> Make:
    """An ONNX file whose weight lies in another file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    return file(f"{folder}/m.onnx", graph(weight))


def arrays(**named: np.ndarray) -> Make:
    return lambda folder: np.savez(folder / "d.npz", **named)


X = np.ones((6, 4), np.float32)
Y = np.arange(6) % 3


def nothing(folder: Path) -> None:
    """Nothing more than what is there already."""


class Case(NamedTuple):
    name: str
    command: str
    """Without what all of its kind get: an output file, or the recipe that measures nothing and a run directory."""
    code: int
    words: str
    """What the message has to say, separated by bars: what was given, what was expected, what to do."""
    make: Make = nothing
    patch: Patch = lambda folder, patch: None


MODEL = (
    Case("missing ONNX file", "simplify gone.onnx", 2, "gone.onnx|does not exist|current folder"),
    Case("missing Python file", "export gone.py:build", 2, "gone.py|does not exist|current folder"),
    Case("file without a factory", "export net.py", 2, "net.py|no factory|net.py:build"),
    Case("wrong factory", "export net.py:biuld", 2, "no 'biuld'|build, bare"),
    Case("factory raises", "export faulty.py:raises", 2, f"ValueError: no weights|{at('faulty.py', '# raises')}"),
    Case("factory exits", "export faulty.py:leaves", 2, f"SystemExit: called exit|{at('faulty.py', 'called exit')}"),
    Case("syntax error", "export bad.py:f", 2, "SyntaxError: invalid syntax|bad.py:2", file("bad.py", "\ndef f(:\n")),
    Case("factory gives None", "export faulty.py:nothing", 2, "returned None|nn.Module|example_inputs"),
    Case("factory gives weights", "export faulty.py:state_dict", 2, "state dict|weights without a model|nn.Module"),
    Case("factory takes other arguments", "export 'net.py:build(depth=3)'", 2, "'depth'|parameters are ()"),
    Case("no example", "export net.py:bare", 2, "no example inputs|return (module, example_inputs)|--input"),
    Case("forward raises", "export faulty.py:broken", 2, f"example inputs failed|{at('faulty.py', '# takes five')}"),
    Case("forward gives no tensor", "export faulty.py:deaf", 2, "faulty.py:deaf|no tensor"),
    Case("no translation", "export odd.py:custom", 1, f"acme.wobble|{at('odd.py', '# no translation')}|rewrite that"),
    Case("branch on values", "export odd.py:branches", 1, f"{at('odd.py', '# depends')}|torch.where"),
    Case("weights as MODEL", "export net.pt", 2, "holds weights|file.py:factory", file("net.pt", b"PK")),
    Case("folder as MODEL", "export bert", 2, "a folder|hf:bert", empty("bert")),
    Case("a pickle", "export pickled.py:build", 2, "net.Net|any code|safetensors|--allow-pickle"),
    Case("broken archive", "export m.pt2", 2, "m.pt2|torch.export.save", file("m.pt2", b"PK nothing")),
    Case("unknown zoo model", "export resnet51", 2, "'resnet51'|did you mean resnet50|zoo: digits"),
    Case("hf: without config", "export hf:./bert", 2, "bert|no config.json|save_pretrained", empty("bert")),
    Case("hf: with broken config", "export hf:.", 2, "config.json", file("config.json", "{")),
    Case("hf: without weights", "export hf:.", 2, "safetensors", file("config.json", '{"model_type": "bert"}')),
)
INPUTS = (
    Case("wrong name", "export net.py:named --input y:float32:batch,4", 2, "--input names y|inputs are x|same names"),
    Case("wrong dtype", "export net.py:build --input x:int64:batch,4", 2, "float32[2, 4]|expected x:int64:batch,4"),
    Case("shape", "export net.py:build --input x:float32:batch,5", 2, "float32[2, 4]|expected x:float32:batch,5|agree"),
    Case("shape refused by forward", "export net.py:bare --input x:float32:batch,5", 2, at("net.py", "self.linear(x)")),
    Case("unreadable", "export net.py:build --input x,float32", 2, "'x,float32'|name:dtype:batch"),
    Case("fixed dimension", "export faulty.py:fixed --input x:float32:batch,4", 2, "batch = 2|instead of 'batch'"),
    Case("range of unknown dimension", "export net.py:build --shape width=1:2:3", 2, "'width'|batch|--input"),
    Case("min above max", "export net.py:build --shape batch=8:4:1", 2, "8:4:1|min <= opt <= max"),
    Case("unreadable range", "export net.py:build --shape batch=1-8", 2, "1-8|min:opt:max"),
    Case("range without dimension", "export net.py:build --shape 1:8:64", 2, "1:8:64|batch=1:8:64"),
    Case("batch out of range", "export net.py:build --shape batch=1:2:4 --batch 8", 2, "--batch 8|1:2:4|widen"),
    Case("batch of zero", "export net.py:build --batch 0", 2, "batch|at least 1|0"),
)
GRAPHS = (
    Case("truncated", "simplify m.onnx", 1, "m.onnx|truncated|copy it again", file("m.onnx", ONNX[:60])),
    Case("random bytes", "simplify m.onnx", 1, "m.onnx|not an ONNX file", file("m.onnx", NOISE)),
    Case("empty", "simplify m.onnx", 1, "m.onnx is empty|again", file("m.onnx", b"")),
    Case("text", "simplify m.onnx", 1, "m.onnx|not an ONNX file|exporter", file("m.onnx", "version https://git-lfs\n")),
    Case("future opset", "simplify m.onnx", 1, "needs opset 99|knows up to|upgrade", file("m.onnx", FUTURE)),
    Case("weights missing", "simplify m.onnx", 1, "'w'|'w.bin'|no such file|beside m.onnx", external("w.bin")),
    Case("inspected", "inspect m.onnx", 1, "m.onnx|truncated", file("m.onnx", ONNX[:60])),
    Case("exported", "export m.onnx", 2, "m.onnx is an ONNX file already|simplify", GIVEN),
    Case("exported with more", "export m.onnx --append sigmoid", 2, "already|--append to it|simplify", GIVEN),
    Case("another input", "simplify m.onnx --input z:float32:4", 2, "z:float32:4|x:float32:batch,4|--input", GIVEN),
    Case("for the compiled engine", "optimize m.onnx --engine compiled", 2, "'compiled'|file.py:factory", GIVEN),
)
CHOICES = (
    Case("unknown engine", "optimize net.py:build --engine tflite", 2, "'tflite'|eager, compiled, aotinductor"),
    Case("unknown device", "optimize net.py:build --device tpu", 2, "'tpu'|cpu, cuda or cuda:1"),
    Case("unknown objective", "optimize net.py:build --objective speed", 2, "'speed'|latency"),
    Case("size without sense", "optimize net.py:build --max-memory lots", 2, "'lots'|256MiB"),
    Case("old opset", "export net.py:build --opset 9", 2, "--opset|18|9"),
    Case("output of another kind", "export net.py:build -o m.trt", 2, "m.trt|.onnx"),
    Case("not a run", "resume .", 2, "no run|optimize"),
    Case("recipe missing", "optimize net.py:build --recipe gone.yaml", 2, "gone.yaml|check the path"),
    Case("no YAML", "optimize digits --recipe r.yaml", 2, "r.yaml is not YAML|line 2|init", file("r.yaml", "[1\n}")),
    Case("field", "optimize digits --recipe r.yaml", 2, "'bach'|did you mean batch", file("r.yaml", "bach: [1]\n")),
)
DATA = (
    Case("missing", "optimize net.py:build --eval gone.npz", 2, "gone.npz|check the path"),
    Case("wrong names", "optimize net.py:build --eval d.npz", 2, "holds 'y'|takes 'x'|name the arrays", arrays(y=X)),
    Case("NaN", "optimize net.py:build --eval d.npz", 2, "'x'|NaN", arrays(x=X * np.nan)),
    Case("labels", "optimize net.py:build --eval d.npz --metric top5", 2, "no labels|top5|--labels KEY", arrays(x=X)),
    Case("no data for the metric", "optimize net.py:build --metric top5", 2, "top5|--eval"),
    Case("no limit", "optimize net.py:build --max-p99 0ms", 2, "--max-p99: must be|given: '0ms'|help describes it"),
    Case("no data for the budget", "optimize net.py:build --max-drop 0.1", 2, "--max-drop needs|--eval"),
    Case("raises", "optimize net.py:build --eval d.npz --metric m:odd", 2, "m:odd|out of order", arrays(x=X, labels=Y)),
)


def hide_packages(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Workers look modules up on this process's path."""
    importlib.import_module("enginesmith.pipeline.workflows.stages")  # which the command line itself needs
    patch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])


def break_timm(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    patch.setattr(sys, "path", [str(folder), *sys.path])


def fill_disk(*names: str) -> Patch:
    """Whatever a step writes under these names goes to a device that is full."""

    def fill(folder: Path, patch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def workspace(store: Store) -> Iterator[Path]:
            with plain(store) as out:
                for name in names:
                    (out / name).symlink_to("/dev/full")
                yield out

        plain = Store.workspace
        patch.setattr(Store, "workspace", workspace)

    return fill


def fill_while_saving(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The disk fills up while the graph is written to the user's file."""
    import onnx_ir

    def save(model: object, path: Path, **options: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    patch.setattr(onnx_ir, "save", save)


def refuse_to_copy(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The disk fills up while the engine is copied into the run directory, after its first file."""

    copied = shutil.copyfile

    def copyfile(source: Path, target: Path, **options: bool) -> None:
        if "variants" not in target.parts:
            copied(source, target)
            return
        target.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    patch.setattr(shutil, "copyfile", copyfile)


STORAGE = (
    Case("below a file", "export net.py:build -o net.py/m.onnx", 1, "net.py/m.onnx|a file is where|another place"),
    Case("full disk", "export net.py:build", 1, "out.onnx|no space left|free some space", patch=fill_while_saving),
    Case("run directory below a file", "optimize net.py:build --out net.py/run", 1, "net.py/run|not a directory|path"),
    Case("full disk: a run", "optimize net.py:build", 1, "out|no space left|free some space", patch=refuse_to_copy),
    Case("full disk: graph", "export net.py:build", 1, "no space left|free some space", patch=fill_disk("model.onnx")),
    Case("full disk: manifest", "export net.py:build", 1, "the store|no space left", patch=fill_disk("artifact.json")),
    Case("store below a file", "export net.py:build --store net.py/s", 1, "net.py/s|not a directory|path"),
    Case("run.json is damaged", "resume out", 2, "out/run.json|damaged|again", file("out/run.json", "{")),
)
MACHINE = (
    Case("no CUDA", "optimize net.py:build --device cuda", 4, "cuda:0 cannot be used|NVIDIA's driver"),
    Case("no timm", "export timm:resnet18", 4, "timm|not installed|pip install", patch=hide_packages),
    Case("no transformers", "export hf:org/name", 4, "transformers|pip install", patch=hide_packages),
    Case("broken timm", "export timm:resnet18", 4, "timm|torchvision::nms|--force-reinstall 'timm>=", patch=break_timm),
)
TABLE = {
    "model": MODEL,
    "inputs": INPUTS,
    "graph": GRAPHS,
    "choice": CHOICES,
    "data": DATA,
    "storage": STORAGE,
    "machine": MACHINE,
}
LONG = ("no translation", "branch on values")
"""Exported by torch.export, which takes ten seconds of a processor; ``test_export.py`` has the same in this process."""
CASES = [
    pytest.param(case, id=f"{group}: {case.name}", marks=[pytest.mark.thorough] * (case.name in LONG))
    for group, cases in TABLE.items()
    for case in cases
]


def completed(command: str) -> list[str]:
    """The command with what all of its kind get."""
    words = shlex.split(command)
    if words[0] in ("export", "simplify") and "-o" not in words:
        words += ["-o", "out.onnx"]
    if words[:2] == ["export", "net.py:build"]:
        words += ["--exporter", "torchscript"]  # the quicker one
    if words[0] == "optimize":
        words += [] if "--recipe" in words else ["--recipe", "quick.yaml"]
        words += [] if "--out" in words else ["--out", "out"]
    return words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a case, with the files that all cases share."""
    place = tmp_path / "here"
    place.mkdir()
    for name, content in FILES.items():
        (place / name).write_text(content)
    monkeypatch.chdir(place)
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))
    return place


def check(answer, code: int, words: str, folder: Path) -> None:
    """One message with these words, the exit code, and nothing half-written."""
    assert answer.code == code, answer.text
    message = re.split(r"(?m)^[Ee]rror: ", answer.stderr)[-1]
    missing = [word for word in words.split("|") if word not in message]
    assert not missing, answer.text
    assert "Traceback" not in answer.text
    assert not (folder / "out.onnx").exists()
    assert [str(path) for path in folder.rglob("*partial*")] == []
    for made in (folder / "out" / "variants").glob("*"):  # what was finished before the failure is whole
        digests = {name: file_digest(made / name) for name in files_below(made, skip=["manifest.json"])}
        assert json.loads((made / "manifest.json").read_text())["sha256"] == folder_digest(digests)
    assert list(folder.parent.glob("store/tmp/*")) == []


@pytest.mark.parametrize("case", CASES)
def test_one_clear_message_and_nothing_half_written(case: Case, cli, folder: Path, monkeypatch) -> None:
    case.make(folder)
    case.patch(folder, monkeypatch)
    answer = cli(*completed(case.command))
    check(answer, case.code, case.words, folder)


def test_a_pickle_is_read_when_that_is_allowed(cli, folder: Path) -> None:
    answer = cli("export", "pickled.py:build", "-o", "m.onnx", "--allow-pickle", "--exporter", "torchscript")
    assert answer.code == 0, answer.text
    assert (folder / "m.onnx").is_file()


def test_a_run_at_work_keeps_others_out(cli, folder: Path) -> None:
    (folder / "out").mkdir()
    with (folder / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = cli(*completed("optimize net.py:build"))
    check(answer, 2, "another run is working in out|wait|--out", folder)


@pytest.mark.thorough
def test_a_folder_that_holds_another_run_is_left_alone(cli, folder: Path) -> None:
    assert cli(*completed("optimize net.py:buidl")).code == 2  # it leaves no result, and so does not stop the next
    assert cli(*completed("optimize net.py:build")).code == 0
    before = (folder / "out" / "run.json").read_bytes()
    answer = cli(*completed("optimize net.py:build --batch 3"))
    assert answer.code == 2, answer.text
    assert "out holds a run of another recipe: batch is [3] here and [2] there" in answer.stderr
    assert "enginesmith resume out" in answer.stderr
    assert (folder / "out" / "run.json").read_bytes() == before


def test_debug_shows_the_trace(cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["enginesmith", "--debug"])
    with pytest.raises(SourceError):
        cli("--debug", "export", "gone.onnx", "-o", "m.onnx")
