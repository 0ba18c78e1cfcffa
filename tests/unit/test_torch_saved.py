"""The stored form of a loaded module, and the module that comes back of it."""

import gc
import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import loading
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import SourceError, StoreError
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.frameworks.torch import factories, saved
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch.factories import Built
from enginesmith.pipeline.frameworks.torch.module import LoadOptions
from enginesmith.pipeline.frameworks.torch.saved import parameters_left_empty
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs, Task, execute, write_records
from loading import ONE, SOURCE, stored

load = loading.load  # a fixture


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


def test_arguments_that_are_no_arrays_come_back(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x, by=1.0, double=True):\n"
        "        return x * by * (2 if double else 1)\n\n"
        "def build():\n    return Net(), (torch.ones(2, 3), 3, False)\n"
    )
    source = resolve(f"{tmp_path}/net.py:build")
    loaded = torch_model.load(source, LoadOptions())
    saved.save(loaded, source, LoadOptions(), tmp_path)
    again = saved.load_artifact(stored(tmp_path))
    assert again.signature.constants == {"by": 3, "double": False}
    assert torch.equal(again.module(ONE)[0], ONE * 3)


@pytest.mark.parametrize("part_bytes", [saved._PART_BYTES, 12])
def test_what_is_stored_comes_back_with_its_weights(
    part_bytes: int, load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "_PART_BYTES", part_bytes)
    loaded = load(Tied(), ONE)
    saved.save(loaded, Source(form="zoo", text="digits", target="digits"), LoadOptions(), tmp_path)
    fresh = Tied()
    nn.init.zeros_(fresh.first.weight)
    monkeypatch.setattr(factories, "build", lambda source: Built(fresh.eval().requires_grad_(False)))
    again = saved.load_artifact(stored(tmp_path))
    assert again.signature == loaded.signature
    torch.testing.assert_close(again.module(ONE)[0], loaded.module(ONE)[0])
    assert fresh.second.weight is fresh.first.weight
    assert len(load_file(tmp_path / "state.safetensors")) == len(fresh.state_dict()) - 1  # the tied one once
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert saved.read_example(stored(tmp_path))["x"].tolist() == ONE.tolist()

    monkeypatch.setattr(factories, "build", lambda source: Built(nn.Linear(3, 3)))
    with pytest.raises(SourceError, match="no longer builds the module"):
        saved.load_artifact(stored(tmp_path))


def test_a_full_disk_is_told_from_other_faults(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: str) -> None:
        def save_file(*args: object) -> None:
            raise SafetensorError(message)

        monkeypatch.setattr("safetensors.torch.save_file", save_file)

    loaded = load(nn.Linear(3, 3), ONE)
    refuse("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(StoreError, match=r"no space left.*\n.*free some space"):
        saved.save(loaded, SOURCE, LoadOptions(), tmp_path)
    refuse("something else")
    with pytest.raises(SafetensorError):
        saved.save(loaded, SOURCE, LoadOptions(), tmp_path)


NET = """
import torch
from torch import nn

hidden = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight
        self.register_buffer("shift", nn.init.normal_(torch.empty(4)), persistent=False)
        {extra}

    def forward(self, x):
        return self.tied(self.layer(x)) + self.shift {use}

def build():
    return Net(), torch.randn(2, 4)
"""


def round_trip(
    tmp_path: Path, extra: str = "pass", use: str = "", top: str = "", example: str = "torch.randn(2, 4)"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a module as it was loaded, and as it comes back from its artifact; ``top`` is above its class."""
    file = tmp_path / f"net_{tmp_path.name}.py"
    code = NET.format(extra=extra, use=use).replace("hidden = []", f"hidden = []\n{top}")
    file.write_text(code.replace("torch.randn(2, 4)", example))
    source, options = resolve(f"{file}:build"), LoadOptions(seed=3)
    loaded = torch_model.load(source, options)
    saved.save(loaded, source, options, tmp_path)
    artifact = Artifact(kind="torch", path=tmp_path / saved.RECORD, sha256="", bytes=0)
    again = saved.load_artifact(artifact)
    x = torch.randn(5, 4)
    return loaded.module(x)[0], again.module(x)[0]


BFLOAT16 = """
import torch
from torch import nn

class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(0.1, dtype=torch.float64))

    def forward(self, x):
        return self.second(self.first(x{cast})).float() * self.scale

def build():
    net = Cast()
    for name in ("first", "second"):
        getattr(net, name).bfloat16()
    return net, torch.randn(2, 4){example}
"""


@pytest.mark.parametrize(("cast", "dtype"), [("", torch.float32), (".to(torch.bfloat16)", torch.bfloat16)])
def test_a_module_in_bfloat16_is_taken_in_float32_where_its_code_allows(
    tmp_path: Path, cast: str, dtype: torch.dtype
) -> None:
    """Weights are held exactly and stay shared, and other types stay; else all stays as it was."""
    file = tmp_path / f"net_{tmp_path.name}.py"
    file.write_text(BFLOAT16.format(cast=cast, example="" if cast else ".bfloat16()"))
    source = resolve(f"{file}:build")
    loaded = torch_model.load(source, LoadOptions(widen=True))
    own = saved.named_tensors(loaded.module.model)
    assert loaded.widened == (dtype == torch.float32) == any("bfloat16" in note for note in loaded.notes)
    assert (own["first.weight"].dtype, own["scale"].dtype) == (dtype, torch.float64)
    assert own["first.weight"].data_ptr() == own["second.weight"].data_ptr()
    assert torch.equal(own["first.weight"], own["first.weight"].bfloat16())
    saved.save(loaded, source, LoadOptions(widen=True), tmp_path)
    again = saved.load_artifact(Artifact(kind="torch", path=tmp_path / saved.RECORD, sha256="", bytes=0))
    assert torch.equal(again.module(*again.example.values())[0], loaded.answers[0])


@pytest.mark.parametrize(
    "places",
    [
        {"extra": "torch.manual_seed(0); nn.Linear(4, 4); self.table = torch.randn(4)", "use": "+ x * self.table"},
        {"top": "nn.Linear(4, 4); TABLE = torch.randn(4)", "use": "+ x * TABLE"},
    ],
    ids=["attribute", "global"],
)
def test_random_numbers_that_the_example_does_not_show_come_back(tmp_path: Path, places: dict[str, str]) -> None:
    """They are drawn after weights, and kept in a plain tensor; the example is of zeros."""
    before, after = round_trip(tmp_path, **places, example="torch.zeros(2, 4)")
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", ["DEF", "FRAGMENT", None])
def test_a_file_that_registers_operators_may_be_executed_again(tmp_path: Path, kind: str | None) -> None:
    """PyTorch takes each name once, and forgets it with the library."""
    name = f"enginesmith_{kind}".lower()
    if kind:
        top = f'LIBRARY = torch.library.Library("{name}", "{kind}"); LIBRARY.define("twice(Tensor x) -> Tensor")'
        top += '; LIBRARY.impl("twice", lambda x: 2 * x, "CPU")'
    else:
        top = f'torch.library.define("{name}::twice", "(Tensor x) -> Tensor")'
        top += f'; torch.library.impl("{name}::twice", "CPU", lambda x: 2 * x)'
    before, after = round_trip(tmp_path, top=top, use=f"+ torch.ops.{name}.twice(x)")
    assert torch.equal(before, after)
    gc.collect()
    assert getattr(torch.ops, name).twice(torch.ones(1)) == 2
    torch.library.define(f"{name}::other", "(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="multiple times"):  # elsewhere it is refused as ever
        torch.library.define(f"{name}::other", "(Tensor x) -> Tensor")


def test_operators_that_a_file_only_declares_stay_when_it_is_executed_again(tmp_path: Path) -> None:
    """Nothing refers to the first library then but what the file made before."""
    top = 'LIBRARY = torch.library.Library("enginesmith_bare", "DEF"); LIBRARY.define("twice(Tensor x) -> Tensor")'
    round_trip(tmp_path, top=top)
    gc.collect()
    assert "twice" in str(torch.ops.enginesmith_bare.twice.default._schema)


SCHEMA = (
    "LIBRARY = torch.library.Library('enginesmith_wrong', 'DEF'); "
    "LIBRARY.define('twice(' + ('Tensr' if hasattr(math, 'once') else 'Tensor') + ' x) -> Tensor')"
)


@pytest.mark.parametrize(
    ("line", "reason"),
    [("assert not hasattr(math, 'once'), 'only once'", "only once"), (SCHEMA, "unknown type specifier")],
)
def test_a_file_that_cannot_be_executed_again_is_refused_with_its_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    try:
        with pytest.raises(SourceError, match=rf"built a second time in one process: .*{reason}") as caught:
            round_trip(tmp_path, top=f"import math; {line}; math.once = True")
    finally:
        del math.once  # type: ignore[attr-defined]
    assert "a module that the file imports" in (caught.value.remedy or "")


@pytest.mark.parametrize("place", ["attribute", pytest.param("global", marks=pytest.mark.thorough)])
def test_another_number_in_the_module_makes_another_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It may be a global name, too, that the code uses."""
    number, records = 'float(__import__("os").environ["SCALE"])', []
    places = {"top": f"SCALE = {number}", "use": "* SCALE"}
    if place == "attribute":
        places = {"extra": f"self.scale = {number}", "use": "* self.scale"}
    for scale in ("1", "2", "1"):
        monkeypatch.setenv("SCALE", scale)
        round_trip(tmp_path, **places)
        records.append((tmp_path / saved.RECORD).read_bytes())
    assert records[0] == records[2] != records[1]


@pytest.mark.parametrize(
    "places",
    [
        {"extra": "self.order = math.order", "use": "* (1 + len(self.order[0]))"},
        {"top": "ORDER = math.order", "use": "* len(ORDER[0])"},
        {"extra": "self.day = datetime.date(2026, 1, len(math.order[0]))", "use": "* self.day.day"},
    ],
    ids=["attribute", "global", "date"],
)
@pytest.mark.parametrize("computes", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_module_that_answers_otherwise_in_another_process_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: dict[str, str], computes: bool
) -> None:
    """Sets keep their order within a process: a number that Python holds stands in for it.

    Much of what differs changes no answer, such as a number of cores.
    """
    imports = "import math, datetime"
    places = {**places, "top": f"{imports}; {places['top']}" if "top" in places else imports}
    monkeypatch.setattr("math.order", ["ant", "eagle"], raising=False)
    round_trip(tmp_path, **(places if computes else {**places, "use": ""}))
    saved.load_artifact(stored(tmp_path))
    monkeypatch.setattr("math.order", ["eagle", "ant"])
    if computes:
        with pytest.raises(SourceError, match="another model each time it is called in another process"):
            saved.load_artifact(stored(tmp_path))
    else:
        saved.load_artifact(stored(tmp_path))


class Answer(Task):
    """Runs a module at another size than that of its example."""

    title: ClassVar[str] = "answer"
    produces: ClassVar[Kind] = "record"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        saved.load_artifact(inputs["model"]).module(torch.zeros(5, 4))
        return write_records(out, [])


def test_code_that_a_module_imports_only_at_another_size_is_read_by_the_step(tmp_path: Path) -> None:
    """The steps after loading run the module at all sizes, and depend on what it imports there."""
    (tmp_path / "late_helper.py").write_text("FACTOR = 2\n")
    late = "* (__import__('late_helper').FACTOR if len(x) > 4 else 1)"
    file = tmp_path / "net_of_late.py"
    file.write_text(NET.format(extra="pass", use=late))
    source, options = resolve(f"{file}:build"), LoadOptions()
    saved.save(torch_model.load(source, options), source, options, tmp_path)
    effect = execute(Answer(), {"model": stored(tmp_path)}, tmp_path, lambda _: None).effect
    assert tmp_path / "late_helper.py" in effect.reads
    assert file not in effect.reads, "loading the model read it already"


def test_parameters_are_listed_and_buffers_are_filled() -> None:
    with parameters_left_empty():
        layer = nn.Linear(8, 8)
        plain = nn.init.constant_(torch.zeros(3), 2.0)
    with parameters_left_empty():
        assert nn.init.ones_(layer.weight) is layer.weight
    assert not torch.equal(layer.weight, torch.ones(8, 8))
    assert plain.tolist() == [2.0, 2.0, 2.0]
    assert nn.init.constant_(nn.Parameter(torch.zeros(1)), 3.0).item() == 3.0


@pytest.mark.parametrize(
    ("extra", "frozen"),
    [("self.table = nn.Parameter(torch.ones(4), False)", ("table",)), ("self.layer.requires_grad_(False)", ())],
)
def test_parameters_that_the_factory_froze_are_known(tmp_path: Path, extra: str, frozen: tuple[str, ...]) -> None:
    file = tmp_path / f"frozen_{len(frozen)}.py"
    file.write_text(NET.format(extra=extra, use=""))
    source, options = resolve(f"{file}:build"), LoadOptions()
    loaded = torch_model.load(source, options)
    saved.save(loaded, source, options, tmp_path)
    assert loaded.frozen == saved.load_artifact(stored(tmp_path)).frozen == frozen


def test_a_module_that_changes_its_input_gets_copies(tmp_path: Path) -> None:
    file = tmp_path / "in_place.py"
    file.write_text(NET.format(extra="pass", use="+ x.sub_(0.5)"))
    source, options = resolve(f"{file}:build"), LoadOptions(processing=ProcessingRequest(append=("sigmoid",)))
    loaded, x = torch_model.load(source, options), torch.zeros(2, 4)
    saved.save(loaded, source, options, tmp_path)
    for each in (loaded, loaded.without_processing, saved.load_artifact(stored(tmp_path))):
        each.module(x)
        assert x.tolist() == [[0.0] * 4] * 2


def test_tied_weights_and_hidden_buffers_come_back(tmp_path: Path) -> None:
    before, after = round_trip(tmp_path)
    assert torch.equal(before, after)


def test_a_parameter_the_module_does_not_know_of_is_still_filled(tmp_path: Path) -> None:
    secret = "self.secret = [nn.init.ones_(nn.Parameter(torch.empty(4)))]"
    before, after = round_trip(tmp_path, secret, "+ self.secret[0]")
    assert torch.equal(before, after)
