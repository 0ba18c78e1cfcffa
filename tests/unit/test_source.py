"""Test what MODEL means, and what can be said about it before anything is loaded."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from enginesmith.models import MODELS
from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.source import SAVED, Source, content_digest, resolve
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.workflows.run_directory import lock_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("net.py", "m.onnx", "m.pt2"):
        (tmp_path / name).touch()
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "form", "target", "factory", "name"),
    [
        ("digits", "zoo", "digits", "digits", "digits"),
        ("net.py:build", "file", "{}/net.py", "build", "net-build"),
        ("./net.py:Nets.build", "file", "{}/net.py", "Nets.build", "net-Nets.build"),
        ("a.b:build", "module", "a.b", "build", "b-build"),
        ("m.onnx", "onnx", "{}/m.onnx", "", "m"),
        ("m.pt2", "pt2", "{}/m.pt2", "", "m"),
        ("hf:org/name@v1", "hf", "org/name@v1", "", "name"),
        ("hf:bert", "hf", "{}/bert", "", "bert"),
        ("timm:resnet18", "timm", "resnet18", "", "resnet18"),
    ],
)
def test_forms(folder: Path, text: str, form: str, target: str, factory: str, name: str) -> None:
    found = resolve(text)
    assert (found.form, found.target, found.factory) == (form, target.format(folder), factory)
    assert (found.name, found.is_torch) == (name, form != "onnx")


@pytest.mark.parametrize(
    ("text", "arguments", "keywords"),
    [
        ("net.py:build(depth=50)", (), {"depth": 50}),
        ("net.py:build(3, [1, 2], path='a:b.py')", (3, [1, 2]), {"path": "a:b.py"}),
        ("resnet50(num_classes=10)", (), {"num_classes": 10}),
        ("timm:resnet18(pretrained=False)", (), {"pretrained": False}),
    ],
)
def test_arguments_are_literals(text: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
    found = resolve(text)
    assert (found.arguments, found.keywords) == (arguments, keywords)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gone.onnx", "'gone.onnx' does not exist"),
        ("gone.py:build", "'gone.py' does not exist"),
        ("net.py", "no factory.*\n.*net.py:build"),
        ("net.py:build(os.getcwd())", "no literal"),
        ("net.py:build(", "cannot read the factory"),
        ("net.py:1 + 2", "cannot read the factory"),
        ("weights.safetensors", "weights, not a model"),
        ("bert", "folder.*\n.*hf:bert"),
        ("hf:", "names no model"),
        ("hf:./gone", "'./gone' does not exist"),
        ("hf:.", "no config.json"),
        ("resnet_50", "did you mean resnet50"),
        ("", "there is no model ''"),
    ],
)
def test_what_cannot_be_a_model(text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        resolve(text)


def test_a_torchscript_file_is_told_from_weights_by_the_names_in_it(folder: Path) -> None:
    with zipfile.ZipFile("net.pt", "w") as archive:
        for member in ("data.pkl", "code/__torch__/net.py", "constants.pkl"):
            archive.writestr(f"net/{member}", b"")
    with pytest.raises(SourceError, match=r"'net\.pt' is a TorchScript module") as caught:
        resolve("net.pt")
    assert "torch.onnx.export(torch.jit.load('net.pt'), " in caught.value.remedy
    with zipfile.ZipFile("weights.pt", "w") as archive:
        archive.writestr("weights/data.pkl", b"")
    for weights in ("weights.pt", "gone.pt"):
        with pytest.raises(SourceError, match="weights, not a model"):
            resolve(weights)


def test_the_message_lists_the_zoo() -> None:
    with pytest.raises(SourceError) as caught:
        resolve("nosuch")
    assert all(name in caught.value.remedy for name in MODELS)


def test_a_source_can_be_written_down() -> None:
    found = resolve("net.py:build(depth=50)")
    assert Source.model_validate_json(found.model_dump_json()) == found


def saved_module(folder: Path, **changes: Any) -> str:
    """Write what a saved module leaves, and return the digest of its content."""
    folder.mkdir()
    record = {"model": "net.py:build", "code": [["net.py", "a"], ["parts.py", "b"]], "packages": {}}
    record |= {
        "signature": {"inputs": [], "outputs": []},
        "output_names": ["y"],
        "surgery": None,
        "processing": None,
        **changes,
    }
    tensors = record.pop("tensors", b"weights")
    (folder / SAVED).write_text(json.dumps(record))
    (folder / "state.safetensors").write_bytes(tensors)
    return content_digest(folder)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"code": [["/elsewhere/net.py", "a"], ["/elsewhere/parts.py", "b"]]}, True),
        ({"packages": {"yaml": "6.0"}, "model": "/elsewhere/net.py:build"}, True),
        ({"code": [["net.py", "a"], ["parts.py", "c"]]}, False),
        ({"tensors": b"others"}, False),
        ({"signature": {"inputs": [], "outputs": [], "returns": "y"}}, False),
        ({"signature": {"inputs": [], "outputs": [], "unsigned": ["tokens"]}}, False),
        ({"output_names": ["z"]}, False),
        ({"surgery": {"history": []}}, False),
        ({"processing": {"prepared": None}}, False),
    ],
)
def test_the_content_of_a_module_is_the_same_elsewhere_and_not_with_other_code(
    tmp_path: Path, changes: dict[str, Any], same: bool
) -> None:
    assert (saved_module(tmp_path / "one") == saved_module(tmp_path / "two", **changes)) == same


def test_a_graph_has_no_content_of_a_module(tmp_path: Path) -> None:
    assert content_digest(tmp_path) == ""


@pytest.mark.parametrize("name", [os.fsdecode(b"caf\xe9"), "caf\udcc3\udca9"])  # Latin-1; UTF-8 in an ASCII locale
def test_a_folder_that_is_not_utf8_is_refused_before_anything_begins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    monkeypatch.setattr(Path, "cwd", lambda: folder)
    with pytest.raises(SourceError, match=r"the current folder: '.*caf.*' is not UTF-8") as caught:
        resolve("digits")
    caught.value.message.encode()
    assert "LC_ALL=C.UTF-8" in caught.value.remedy
    with pytest.raises(SourceError, match="the run directory"), lock_folder(folder):
        pass
    with pytest.raises(SourceError, match="data: 'caf"):
        make({"model": "digits", "data": f"{name}/data.npz"})
    assert not folder.exists()
