"""Test what steps read of the user's: changes are noticed, and a list is of use where a project lies elsewhere."""

import errno
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from enginesmith.calibration.options import AS_FOUND
from enginesmith.pipeline.artifact import Effect, Kind, json_digest
from enginesmith.pipeline.errors import StoreError
from enginesmith.pipeline.execution.executor import StepCache
from enginesmith.pipeline.frameworks.torch import file_tracking
from enginesmith.pipeline.frameworks.torch.packages import PRELOADED
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.planning.plan import Step, StepRef
from enginesmith.pipeline.store import inputs
from enginesmith.pipeline.store.inputs import InputDependencies, ReadRecord
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import software
from enginesmith.pipeline.tasks.base import Done, Inputs, Task, execute, write_records
from enginesmith.pipeline.tasks.calibrate import open_data
from enginesmith.pipeline.tensors import TensorSpec


def effect(reads: Iterable[Path], packages: dict[str, str], **more: Any) -> Effect:
    return Effect(file="", summary="", reads=tuple(reads), packages=packages, **more)


@pytest.fixture
def reads(tmp_path: Path) -> InputDependencies:
    return InputDependencies(tmp_path / "reads", "x")


def now(reads: InputDependencies) -> ReadRecord | None:
    return next(reads.candidates(), None)


def test_reads_tell_whether_files_are_as_they_were(reads: InputDependencies, tmp_path: Path) -> None:
    code, weights = tmp_path / "net.py", tmp_path / "w.safetensors"
    code.write_text("a")
    weights.write_text("b")
    assert now(reads) is None
    before = reads.record(effect([code, weights], software.identities(["numpy"])))
    assert now(reads) == before
    weights.write_text("c")
    changed = now(reads)
    assert changed.identity != before.identity
    (tmp_path / "w2.safetensors").touch()
    assert now(reads) is None
    (tmp_path / "w2.safetensors").unlink()
    assert now(reads) is not None
    code.unlink()
    assert now(reads) is None


def test_environment_variables_and_names_in_folders_are_part_of_the_key(
    reads: InputDependencies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.setenv("CHOICE", "a")
    monkeypatch.delenv("ABSENT", raising=False)

    def record() -> ReadRecord:
        return reads.record(effect([tmp_path / "weights"], {}, variables=["CHOICE", "ABSENT"]))

    before = record()
    assert now(reads) == before
    for name, value in (("CHOICE", "b"), ("ABSENT", "")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert now(reads).identity != before.identity
    (tmp_path / "weights" / "new.pt").touch()
    assert now(reads) is None
    assert record().identity != before.identity


def test_all_environment_variables_but_the_usual_ones_may_be_part_of_the_key(
    reads: InputDependencies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEW", raising=False)
    before = reads.record(effect([], {}, variables=[inputs.ALL_VARIABLES]))
    assert now(reads) == before
    for name, other in (("PWD", False), ("OLDPWD", False), ("SSH_TTY", False), ("CI_JOB_ID", False), ("NEW", True)):
        monkeypatch.setenv(name, "elsewhere")
        assert (now(reads).identity != before.identity) is other


def test_a_variable_of_the_session_is_part_of_the_key_where_it_is_named(
    reads: InputDependencies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHLVL", "1")
    before = reads.record(effect([], {}, variables=[inputs.ALL_VARIABLES, "SHLVL"]))
    assert now(reads) == before
    monkeypatch.setenv("SHLVL", "2")
    assert now(reads).identity != before.identity


@pytest.mark.parametrize("there", [True, False])
def test_a_path_that_was_asked_for_and_appears_or_goes_is_a_change(
    reads: InputDependencies, tmp_path: Path, there: bool
) -> None:
    flag = tmp_path / "ck" / "flag"
    flag.parent.mkdir()
    change, undo = (flag.unlink, flag.touch) if there else (flag.touch, flag.unlink)
    if there:
        flag.touch()
    before = reads.record(effect([], {}, existence={flag: there}))
    assert now(reads) == before
    change()
    assert now(reads) is None
    assert reads.record(effect([], {}, existence={flag: not there})).identity != before.identity
    undo()
    assert now(reads) == before


@pytest.mark.parametrize(("target", "other"), [("v2", "v3"), (None, "v3"), ("", None)])
def test_a_link_that_leads_elsewhere_is_a_change(
    reads: InputDependencies, tmp_path: Path, target: str | None, other: str | None
) -> None:
    link = tmp_path / "link"

    def make(leads: str | None) -> None:
        link.unlink(missing_ok=True)
        if leads:
            link.symlink_to(leads)
        elif leads is not None:
            link.touch()

    make(target)
    before = reads.record(effect([], {}, links={link: target}))
    assert now(reads) == before
    make(other)
    assert now(reads) is None
    assert reads.record(effect([], {}, links={link: other})).identity != before.identity
    make(target)
    assert now(reads) == before


@pytest.mark.parametrize("new", ["helper.py", "helper/__init__.py", "helper.abi3.so"])
def test_a_module_in_a_folder_that_python_searches_earlier_is_a_change(
    reads: InputDependencies, tmp_path: Path, new: str
) -> None:
    before = reads.record(effect([], {}, absent_modules={tmp_path / "first": ("helper",)}))
    assert now(reads) == before
    (tmp_path / "first" / new).parent.mkdir(parents=True)
    (tmp_path / "first" / "other.py").touch()
    assert now(reads) == before
    (tmp_path / "first" / new).touch()
    assert now(reads) is None


def test_a_package_that_comes_before_a_file_of_its_name_is_a_change(reads: InputDependencies, tmp_path: Path) -> None:
    (tmp_path / "helper.py").touch()
    before = reads.record(effect([tmp_path / "helper.py"], {}))
    (tmp_path / "helper").mkdir()
    assert now(reads) == before, "Python prefers the file"
    (tmp_path / "helper" / "__init__.py").touch()
    assert now(reads) is None


def test_a_folder_that_may_not_be_looked_into_is_no_package(
    reads: InputDependencies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    for name in ("of_root", ".hidden"):
        (folder / name).mkdir(parents=True)
    (folder / "net.py").touch()
    (folder / "loop.py").symlink_to("loop.py")
    stat, asked = os.stat, list[str]()

    def refuse(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        asked.append(str(path))
        if "of_root/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return stat(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        before = reads.record(effect([folder / "net.py", folder], {}))
        assert now(reads) == before
    assert before.listings == (("net.py",), ("of_root",))
    assert not any(".hidden" in path for path in asked)


def test_a_file_may_be_read_in_a_folder_that_may_not_be_listed(
    reads: InputDependencies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").touch()
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        before = reads.record(effect([tmp_path / "net.py"], {}))
        assert now(reads) == before
    assert now(reads) is None, "it may be listed now, and code may look for other files"


def test_paths_in_environment_variables_mean_the_same_in_another_folder(
    reads: InputDependencies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / name / 'src'}:/opt/lib")
        identities.append(reads.record(effect([], {}, variables=["PYTHONPATH"])).identity)
    assert identities[0] == identities[1]
    assert identities[0]["variables"] == {"PYTHONPATH": "{project}/src:/opt/lib"}


@pytest.mark.parametrize(("code", "apart"), [([], True), (["metric.py"], False)])
def test_beside_arrays_other_files_are_looked_at_only_where_code_was_read(
    reads: InputDependencies, tmp_path: Path, code: list[str], apart: bool
) -> None:
    """A log that is written beside the data changes nothing; code may look for any file."""
    folder = tmp_path / "set"
    folder.mkdir()
    files = [folder / "data.npz", *(tmp_path / name for name in code)]
    for file in files:
        file.write_text("a")
    before = reads.record(effect(files, {}))
    (folder / "run.log").touch()
    assert (now(reads) == before) is apart
    (folder / "data.npz").write_text("b")
    assert (now(reads) is not None) is apart


def test_a_folder_that_was_read_as_a_whole_is_looked_at_too(reads: InputDependencies, tmp_path: Path) -> None:
    (tmp_path / "set" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "cat" / "1.png").write_text("a cat")
    before = reads.record(effect([tmp_path / "set" / "cat" / "1.png", tmp_path / "set"], {}))
    assert now(reads) == before
    assert [Path(name).name for name in before.files] == ["1.png"]
    (tmp_path / "set" / "dog").mkdir()
    assert now(reads) is None
    (tmp_path / "set" / "dog").rmdir()
    assert now(reads) == before
    (tmp_path / "set" / "readme").write_text("a file in a folder without images")
    assert now(reads) is None


def test_files_of_one_name_are_told_apart_by_their_folders(reads: InputDependencies, tmp_path: Path) -> None:
    paths = [tmp_path / place / "w" for place in ("encoder", "decoder")]
    for path, content in zip(paths, "ab", strict=True):
        path.parent.mkdir()
        path.write_text(content)
    before = reads.record(effect(paths, {}))
    for path, content in zip(paths, "ba", strict=True):
        path.write_text(content)
    found = now(reads)
    assert found.identity != before.identity


def _project(folder: Path, code: str = "code") -> Path:
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(code)
    return folder


def test_a_list_is_of_use_to_the_same_project_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = _project(tmp_path / "alice" / "net"), _project(tmp_path / "work" / "copy")
    monkeypatch.chdir(here)
    before = InputDependencies(tmp_path / "reads", "x").record(effect([here / "net.py"], {}))
    assert list(before.files) == ["{project}/net.py"]
    monkeypatch.chdir(there)
    found = now(InputDependencies(tmp_path / "reads", "x"))
    assert found.identity == before.identity
    (there / "net.py").write_text("other code")
    changed = now(InputDependencies(tmp_path / "reads", "x"))
    assert changed.identity != before.identity


def test_projects_that_read_other_files_under_one_name_keep_their_lists(
    reads: InputDependencies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = []
    for name in ("one", "two"):
        folder = _project(tmp_path / name)
        (folder / f"{name}.bin").write_text(name)
        monkeypatch.chdir(folder)
        identities.append(reads.record(effect([folder / "net.py", folder / f"{name}.bin"], {})).identity)
    for name, identity in zip(("one", "two"), identities, strict=True):
        monkeypatch.chdir(tmp_path / name)
        assert [found.identity for found in reads.candidates()] == [identity]


def test_a_damaged_list_leads_nowhere(reads: InputDependencies, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    reads.record(effect([tmp_path / "a", tmp_path / "b"], {}))
    (path,) = (tmp_path / "reads" / "x").iterdir()
    whole = path.read_text()
    name = inputs.to_portable_path(str(tmp_path / "b"))
    path.write_text(whole.replace(f',"{name}"]', "]", 1))
    assert path.read_text() != whole
    assert now(reads) is None
    path.write_text("{")
    assert now(reads) is None


def test_what_somebody_else_names_is_read_only_if_it_is_a_file(reads: InputDependencies, tmp_path: Path) -> None:
    """A device may have no end; this one is chosen for having one."""
    (tmp_path / "folder").mkdir()
    queue = tmp_path / "folder" / "w"
    queue.write_text("w")
    reads.record(effect([queue], {}))
    (path,) = (tmp_path / "reads" / "x").iterdir()
    noted = json.loads(path.read_text())["candidate"] | {"files": ["/dev/null"]}
    (path.parent / f"{json_digest(noted)}.json").write_text(json.dumps({"candidate": noted}))
    path.unlink()
    assert now(reads) is None


def test_nothing_is_hashed_twice(reads: InputDependencies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "w"
    weights.write_text("w")
    before = reads.record(effect([weights], {}))
    os.utime(weights, ns=(0, 0))
    hashed: list[Path] = []
    monkeypatch.setattr(
        "enginesmith.pipeline.store.manifest.file_digest",
        lambda path: hashed.append(path) or before.files[str(path)].sha256,
    )
    for _ in range(2):
        found = now(reads)
        assert found.identity == before.identity
    assert hashed == [weights]


def test_on_a_full_disk_it_is_the_store_there_that_is_to_be_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "my store")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(inputs, "write_whole", refuse)
    with pytest.raises(StoreError, match=f"cache prune --store '{tmp_path}/my store' --max-size"):
        store.dependencies("x").record(effect([], {}))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match=f"cache prune --store '{tmp_path}/my store' --max-size"), store.workspace():
        pass


class Copy(Task):
    title: ClassVar[str] = "copy"
    produces: ClassVar[Kind] = "record"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        raise AssertionError


def test_a_result_is_not_found_under_content_that_came_while_it_was_made(tmp_path: Path) -> None:
    data = tmp_path / "metric.py"
    data.write_text("old")
    cache = StepCache(Step(StepRef("copy"), Copy()), {}, Store(tmp_path / "store"))

    def work(out: Path, _: Path | None) -> Done:
        (out / "copy").write_text(data.read_text())
        time.sleep(0.02)  # the kernel's clock of files has ticks
        data.write_text("new")
        return Done(effect=Effect(file="copy", summary="copied", reads=(data,)), seconds=0, host_peak_bytes=None)

    made = cache.make(work)
    assert made.path.read_text() == "old"
    assert made.history[-1].notes == (f"{data} changed while it ran: it is done again the next time",)
    assert cache.lookup() is None
    assert cache.make(work).path.read_text() == "new"  # it is written again, with the same content
    assert cache.lookup().path.read_text() == "new"


class Open(Copy):
    """Opens the data of a function, as many tasks do."""

    reference: str

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        data, files = open_data(
            self.reference, [TensorSpec(name="x", dtype="float32", shape=("batch", 1))], "test", AS_FOUND
        )
        return write_records(out, [], f"{data.arrays['x'][0, 0]}", reads=files)


def install(place: Path, name: str, number: int, *, owned: bool = True) -> None:
    """Install a package of one module, always with one version; or a module that belongs to no package."""
    (place / f"{name}.py").write_text(f"NUMBER = {number}\n")
    if owned:
        (folder := place / f"{name}-0.1.dist-info").mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (folder / "top_level.txt").write_text(f"{name}\n")
        (folder / "RECORD").write_text(f"{name}.py,sha256={number},11\n../../../bin/{name},sha256=here,9\n")


@pytest.mark.parametrize("kind", ["package", "loose", "missing"])
def test_installed_code_that_a_function_of_data_imports_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One's own package is installed again with its version; a package that was tried in vain may be installed."""
    (place := tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(place)
    name, loader = f"installed_{kind}", tmp_path / f"loads_{kind}.py"
    monkeypatch.setitem(sys.modules, PRELOADED, SimpleNamespace(COMMON=frozenset(sys.modules)))
    loader.write_text(
        f"import numpy\ntry:\n    from {name} import NUMBER\nexcept ImportError:\n    NUMBER = 1\n"
        "def f():\n    yield {'x': numpy.full((3, 1), NUMBER, 'float32')}\n"
    )
    if kind != "missing":
        install(place, name, 1, owned=kind == "package")
    monkeypatch.setattr(file_tracking, "_FOREIGN", (*file_tracking._FOREIGN, f"{place}/"))
    step = Step(StepRef("copy"), Open(reference=f"{loader}:f"))

    def cache() -> StepCache:
        return StepCache(step, {}, Store(tmp_path / "store"))

    def make() -> str:
        for module in (name, f"file {loader}"):
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        return cache().make(lambda out, _: execute(step.task, {}, out, lambda _: None)).history[-1].effect

    try:
        assert make() == "1.0"
        assert cache().lookup() is not None
        install(place, name, 2, owned=kind == "package")
        assert cache().lookup() is None
        assert make() == "2.0"
        assert cache().lookup() is not None
    finally:
        sys.modules.pop(name, None)


def test_scripts_and_what_an_installer_notes_are_no_part_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name the Python and the folders of one machine."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "moved_package", 1)
    before, record = software.identify("moved_package"), tmp_path / "moved_package-0.1.dist-info/RECORD"
    record.write_text(
        record.read_text().replace("here", "there") + "moved_package-0.1.dist-info/INSTALLER,sha256=x,4\n"
    )
    assert before == software.identify("moved_package")
    install(tmp_path, "moved_package", 2)
    assert before != software.identify("moved_package")
    assert (before or "").startswith("0.1 ")
    assert software.identify("moved_away_package") is None


def test_a_result_of_what_nobody_saw_is_not_found(tmp_path: Path) -> None:
    def work(out: Path, _: Path | None) -> Done:
        (out / "copy").write_text("made")
        effect = Effect(file="copy", summary="copied", unknown=("a process read files",))
        return Done(effect=effect, seconds=0, host_peak_bytes=None)

    cache = StepCache(Step(StepRef("copy"), Copy()), {}, Store(tmp_path / "store"))
    made = cache.make(work)
    assert made.history[-1].notes == ("a process read files: it is done again the next time",)
    assert cache.lookup() is None


def test_a_result_that_was_cut_short_is_found_only_where_it_is_good_enough(tmp_path: Path) -> None:
    def work(out: Path, _: Path | None) -> Done:
        (out / "copy").write_text("part")
        effect = Effect(file="copy", summary="copied", incomplete=True)
        return Done(effect=effect, seconds=0, host_peak_bytes=None)

    step, store = Step(StepRef("copy"), Copy()), Store(tmp_path / "store")
    made = StepCache(step, {}, store).make(work)
    assert StepCache(step, {}, store).lookup() is None
    assert StepCache(replace(step, as_it_was=True), {}, store).lookup().sha256 == made.sha256


@pytest.mark.parametrize(
    ("folder", "anchor"), [("project", "{project}"), ("home", "{home}"), ("home/project", "{project}"), ("data", "")]
)
def test_the_nearest_anchor_is_taken(folder: str, anchor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / (folder if "project" in folder else "project")
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    inputs._anchors.cache_clear()
    path = str(tmp_path / folder / "sub" / "w")
    name = inputs.to_portable_path(path)
    assert name == (f"{anchor}/sub/w" if anchor else path)
    assert inputs.anchor_of(name) == anchor
    assert inputs.from_portable_path(name) == path
    inputs._anchors.cache_clear()


def test_what_comes_with_enginesmith_is_found_in_another_installation() -> None:
    own = Path(inputs.__file__).parents[2]
    assert inputs.to_portable_path(str(own / "models" / "weights" / "w")) == "{enginesmith}/models/weights/w"
    assert inputs.from_portable_path("{enginesmith}/models/weights/w") == str(own / "models" / "weights" / "w")
    assert not inputs.to_portable_path(str(own) + "-other/models/w").startswith("{enginesmith}")
    assert inputs.to_portable_path("timm:resnet18") == "timm:resnet18"
