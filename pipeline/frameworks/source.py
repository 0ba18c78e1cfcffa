"""Resolve MODEL of the command line. Nothing is imported or loaded here; that happens in a worker.

========================  =======================================================================
``digits``                a model of the zoo, with arguments if wanted: ``resnet50(num_classes=10)``
``path/file.py:factory``  a callable in a file: ``net.py:build``, ``net.py:build(depth=50)``
``package.module:name``   a callable in a module that Python can import from the current folder
``model.onnx``            an ONNX file, with its external data beside it
``model.pt2``             a ``torch.export`` archive
``model.engine``          a TensorRT engine with its manifest beside it, to be measured or verified
``hf:org/name@revision``  a Hugging Face model, or a local folder with config.json and safetensors
``timm:name``             a timm model
``pruned/``               a folder that ``enginesmith prune`` wrote, with model.json in it
========================  =======================================================================
"""

import ast
import difflib
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from enginesmith.models import MODELS
from enginesmith.pipeline.artifact import file_digest, json_digest
from enginesmith.pipeline.errors import SourceError, require_utf8

Form = Literal["zoo", "file", "module", "onnx", "pt2", "engine", "hf", "timm", "saved"]

SAVED = "model.json"
"""File that tells a folder with a saved model from others."""
_SUFFIXES: dict[str, Form] = {".onnx": "onnx", ".pt2": "pt2", ".engine": "engine"}
_LONGEST, _LONGEST_NAME = 4095, 255
"""Bytes of the longest path, and of the longest name in it, that Linux takes."""
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
TORCHSCRIPT_REMEDY = (
    "give a factory of the module that it was made from; or make an ONNX file of it in Python, and give that: "
    "torch.onnx.export({loaded}, (example,), 'model.onnx', dynamo=False, input_names=['x'], "
    "dynamic_axes={{'x': {{0: 'batch'}}}})"
)
"""Way out for a TorchScript module, with its expression in Python as ``loaded``; torch.export does not take it."""


class Source(BaseModel, frozen=True):
    """A MODEL argument taken apart: ``target`` is a path, module or name, ``factory`` the callable in it."""

    form: Form
    text: str
    target: str
    factory: str = ""
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Short name for folders and titles."""
        last = Path(self.target.partition("@")[0]).stem if self.form != "module" else self.target.rpartition(".")[2]
        return f"{last}-{self.factory}" if self.form in ("file", "module") else last

    @property
    def is_torch(self) -> bool:
        """True if there is a module behind it that can be run eagerly."""
        return self.form not in ("onnx", "engine")

    @property
    def libraries(self) -> tuple[str, ...]:
        """Heavy modules that building it will import, as far as can be told from outside: worth importing only once."""
        folder = Path(self.target)
        if self.form == "timm":
            return ("timm",)
        if self.form == "hf":
            try:
                kind = json.loads((folder / "config.json").read_bytes())["model_type"]
            except (OSError, ValueError, KeyError, TypeError):  # on the hub, and so unknown before it is loaded
                return (_HEAVY["transformers"],)
            return _HEAVY["transformers"], f"transformers.models.{kind}.modeling_{kind}".replace("-", "_")
        if self.form == "saved":
            try:
                inner = json.loads((folder / SAVED).read_bytes())["model"]
                return resolve(rebase(inner, folder, Path.cwd())).libraries
            except (OSError, ValueError, LookupError, TypeError, SourceError):  # which loading explains
                return ()
        text = Path(self.target).read_text(encoding="utf-8", errors="ignore") if self.form == "file" else ""
        named = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))
        return tuple(module for name, module in _HEAVY.items() if name in named)


_HEAVY = {"transformers": "transformers.modeling_utils", "timm": "timm", "torchvision": "torchvision"}


def rebase(text: str, old: Path, new: Path) -> str:
    """Rewrite a MODEL argument whose path is taken from the folder ``old``, as it is given from the folder ``new``.

    Names of zoo models, modules and libraries stay, and so do absolute paths.
    """
    head, separator, rest = text.partition(":")
    path, _, call = _split_call(text)
    if separator and head == "hf":
        if not (old / rest).is_dir():
            return text
        before, given, after = "hf:", rest, ""
    elif Path(text).suffix in _SUFFIXES:
        before, given, after = "", text, ""
    elif path.endswith(".py"):
        before, given, after = "", path, f":{call}"
    else:
        return text
    expanded = Path(given).expanduser()
    return text if expanded.is_absolute() else before + os.path.relpath(old / expanded, new) + after


def resolve(text: str) -> Source:
    """Take a MODEL argument apart, and check what can be checked without loading anything.

    Raises:
        SourceError: it is of no known form, or names a file or zoo model that does not exist; or the name of the
            current folder, which paths are made absolute with, is not UTF-8.
    """
    require_utf8(str(Path.cwd()), "the current folder")
    if len(os.fsencode(text)) > _LONGEST:
        raise SourceError(f"{text[:40]}… is no model: it has {len(text)} characters", "check the argument")
    parts = Path(_split_call(text)[0].partition("(")[0]).parts
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        raise SourceError(f"{text[:40]}… is no model, and too long for a file's name", "check the argument")
    head, separator, rest = text.partition(":")
    if separator and head in ("hf", "timm"):
        return _library(text, head, rest)
    if suffix := _SUFFIXES.get(Path(text).suffix):
        return Source(form=suffix, text=text, target=str(_existing(text)))
    path, separator, call = _split_call(text)
    if not separator:
        return _zoo_or_saved(text)
    name, args, kwargs = _call(text, call)
    form: Form = "file" if path.endswith(".py") else "module"
    target = str(_existing(path)) if form == "file" else path
    return Source(form=form, text=text, target=target, factory=name, arguments=args, keywords=kwargs)


def _split_call(text: str) -> tuple[str, str, str]:
    """Split at the last colon before any parenthesis: ``file.py:build(x='a:b')``."""
    head, parenthesis, arguments = text.partition("(")
    path, separator, name = head.rpartition(":")
    return (path, separator, name + parenthesis + arguments) if separator else (text, "", "")


def _existing(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        remedy = f"check the path; it is taken from the current folder, {Path.cwd()}"
        raise SourceError(f"the model file {text!r} {problem}", remedy)
    return path.resolve()


def _call(text: str, call: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Read ``build`` or ``build(depth=50)``; arguments are Python literals and are never evaluated."""
    try:
        node = ast.parse(call, mode="eval").body
        if isinstance(node, ast.Call):
            args = tuple(ast.literal_eval(arg) for arg in node.args)
            kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
            return ast.unparse(node.func), args, kwargs
        if isinstance(node, (ast.Name, ast.Attribute)):
            return ast.unparse(node), (), {}
    except (SyntaxError, ValueError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else "an argument is no literal"
        remedy = "write it as file.py:build or file.py:build(depth=50), with literal arguments"
        raise SourceError(f"cannot read the factory in {text!r}: {problem}", remedy) from error
    raise SourceError(f"cannot read the factory in {text!r}", "write it as file.py:build or file.py:build(depth=50)")


def _library(text: str, form: str, rest: str) -> Source:
    if not rest:
        raise SourceError(f"{text!r} names no model", f"write it as {form}:name")
    if form == "hf":
        folder = Path(rest).expanduser()
        if not folder.is_dir() and rest.startswith((".", "/", "~")):
            raise SourceError(f"the folder {rest!r} does not exist", "give a folder with config.json and safetensors")
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise SourceError(f"the folder {rest!r} has no config.json", "save the model there with save_pretrained")
        return Source(form="hf", text=text, target=str(folder.resolve()) if folder.is_dir() else rest)
    name, parenthesis, arguments = rest.partition("(")
    kwargs = _call(text, f"create({arguments}")[2] if parenthesis else {}
    return Source(form="timm", text=text, target=name, keywords=kwargs)


def _zoo_or_saved(text: str) -> Source:
    name, args, kwargs = _call(text, text) if "(" in text else (text, (), {})
    if name in MODELS:
        return Source(form="zoo", text=text, target=name, factory=name, arguments=args, keywords=kwargs)
    path = Path(text)
    if path.suffix == ".py":
        raise SourceError(f"{text!r} names a file but no factory", f"add the callable: {text}:build")
    if _is_torchscript(path):
        loaded = f"torch.jit.load({text!r})"
        raise SourceError(
            f"{text!r} is a TorchScript module (torch.jit.save), which engines cannot be made from",
            TORCHSCRIPT_REMEDY.format(loaded=loaded),
        )
    if path.suffix in _WEIGHTS:
        raise SourceError(
            f"{text!r} holds weights, not a model",
            "write a small file.py with a factory that builds the module and loads them, and give file.py:factory",
        )
    if text and path.is_dir():
        if (path / SAVED).is_file():
            return Source(form="saved", text=text, target=str(path.resolve()))
        raise SourceError(
            f"{text!r} is a folder, and not one that `enginesmith prune` wrote: it has no {SAVED}",
            f"a Hugging Face folder is given as hf:{text}",
        )
    near = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.4)
    raise SourceError(
        f"there is no model {text!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
        f"zoo: {', '.join(MODELS)}; or file.py:factory, package.module:factory, model.onnx, model.pt2, hf:…, timm:…",
    )


def _is_torchscript(path: Path) -> bool:
    """Tell whether a file is an archive of torch.jit.save, by the names of its members: weights alone have no code."""
    try:
        with zipfile.ZipFile(path.expanduser()) as archive:
            members = [name.partition("/")[2] for name in archive.namelist()]  # all are in one folder
    except (OSError, zipfile.BadZipFile):
        return False
    return "constants.pkl" in members and any(member.startswith("code/") for member in members)


def content_digest(folder: Path) -> str:
    """Compute the digest of a saved module's content: its tensors, its signature, and the files that it is built by.

    Unlike the artifact's own digest, it does not depend on where the files lie, nor on which packages were imported.
    Empty for a folder without a saved module.
    """
    if not (folder / SAVED).is_file():
        return ""
    record = json.loads((folder / SAVED).read_bytes())
    code = sorted(digest for _, digest in record["code"])
    tensors = [file_digest(path) for path in sorted(folder.glob("*.safetensors"))]
    parts = (record[name] for name in ("signature", "output_names", "surgery", "processing"))
    return json_digest([code, tensors, *parts])
