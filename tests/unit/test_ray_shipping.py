"""What travels to the nodes of a cluster."""

import os
from pathlib import Path

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.execution.ray import runtime_env
from enginesmith.pipeline.execution.ray.remote import claimed
from enginesmith.pipeline.execution.ray.runtime_env import PROJECT, files_named, staged
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.tasks.load import Load


def touch(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_code_and_project_travel_and_what_is_no_part_of_them_stays(tmp_path: Path) -> None:
    project, store = tmp_path / "project", tmp_path / "project/store"
    wanted = {"net.py", "data/train.npz", "ignored.npz", "queue.py"}
    unwanted = {".git/HEAD", ".env", "venv/pyvenv.cfg", "venv/lib.py", "runs/one/run.json", "runs/one/model.onnx"}
    unwanted |= {"store/objects/x", "__pycache__/net.pyc", ".gitignore"}
    for name in wanted | unwanted:
        touch(project / name)
    (project / "gone").symlink_to("nowhere")
    (project / "loop").symlink_to(".")
    with staged(project, skip=store) as (code, files):
        found = {str(path.relative_to(files)) for path in Path(files).rglob("*") if path.is_file()}
        assert found == wanted
        assert (Path(files).name, Path(code).name) == (PROJECT, "enginesmith")
        assert (Path(files) / "data/train.npz").read_text() == "x"
        assert (Path(code) / "pipeline/execution/ray/remote.py").is_file()
        assert (Path(code) / "models/weights").is_dir()
        assert not [*Path(code).rglob("__pycache__")]
    assert not Path(files).exists()
    assert (project / "net.py").exists()


def test_too_much_is_refused_with_the_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "small.py")
    touch(tmp_path / "weights/large.npz", "x" * 100)
    monkeypatch.setattr(runtime_env, "_LARGEST_BYTES", 50)
    with (
        pytest.raises(UsageError, match="holds 101 B in 2 files: more than Ray takes") as caught,
        staged(tmp_path, tmp_path / "s"),
    ):
        pass
    assert "the largest files are weights/large.npz (100 B), small.py" in caught.value.remedy
    monkeypatch.setattr(runtime_env, "_MOST_FILES", 1)
    with pytest.raises(UsageError, match="holds more than 1 files"), staged(tmp_path, tmp_path / "s"):
        pass


def test_files_that_a_step_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model given from the current folder travels with it; under its full path it has to be there on the nodes."""
    project = tmp_path / "project"
    touch(project / "net.py")
    touch(tmp_path / "other.py")
    monkeypatch.chdir(project)
    assert files_named(Load(source=resolve("net.py:build")), project) == ()
    assert files_named(Load(source=resolve("digits")), project) == ()
    for given in (f"{project}/net.py", f"{tmp_path}/other.py", "../other.py"):
        named = files_named(Load(source=resolve(f"{given}:build")), project)
        assert named == (os.path.normpath(project / given),)


def test_two_processes_do_not_claim_the_same_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    with claimed(2, tmp_path) as first, claimed(1, tmp_path) as second:
        assert (first, second) == ({2, 3}, {5})
        with claimed(2, tmp_path) as third, claimed(2, tmp_path) as fourth:
            assert third == {7}, "fewer are free than wanted"
            assert fourth is None, "nobody waits for a core"
    with claimed(3, tmp_path) as again:
        assert again == {2, 3, 5}
    with claimed(4, tmp_path) as all_, claimed(None, tmp_path) as any_:
        assert all_ is any_ is None
