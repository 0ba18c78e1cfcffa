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
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from enginesmith.models import MODELS
from enginesmith.pipeline.errors import SourceError

Form = Literal["zoo", "file", "module", "onnx", "pt2", "engine", "hf", "timm", "saved"]

SAVED = "model.json"
"""What tells a folder with a saved model from others."""
_SUFFIXES: dict[str, Form] = {".onnx": "onnx", ".pt2": "pt2", ".engine": "engine"}
_LONGEST = 4095
"""Bytes of the longest path that Linux takes."""
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")


class Source(BaseModel):
    """A MODEL argument taken apart: ``target`` is a path, module or name, ``factory`` the callable in it."""

    model_config = ConfigDict(frozen=True)

    form: Form
    text: str
    target: str
    factory: str = ""
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Return a short name for folders and titles."""
        last = Path(self.target.partition("@")[0]).stem if self.form != "module" else self.target.rpartition(".")[2]
        return f"{last}-{self.factory}" if self.form in ("file", "module") else last

    @property
    def is_torch(self) -> bool:
        """Tell whether there is a module behind it that can be run eagerly."""
        return self.form not in ("onnx", "engine")

    @property
    def libraries(self) -> tuple[str, ...]:
        """Heavy modules that building it will import, as far as can be told from outside: worth importing only once."""
        if self.form == "hf":
            return _transformers_modules(Path(self.target))
        if self.form == "timm":
            return ("timm",)
        if self.form == "saved":
            return _saved_libraries(Path(self.target))
        text = Path(self.target).read_text(errors="ignore") if self.form == "file" else ""
        named = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))
        return tuple(module for name, module in _HEAVY.items() if name in named)


_HEAVY = {"transformers": "transformers.modeling_utils", "timm": "timm", "torchvision": "torchvision"}


def _transformers_modules(folder: Path) -> tuple[str, ...]:
    """Return the module of a local model's class; of one on the hub nothing is known before it is loaded."""
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return (_HEAVY["transformers"],)
    return _HEAVY["transformers"], f"transformers.models.{kind}.modeling_{kind}".replace("-", "_")


def _saved_libraries(folder: Path) -> tuple[str, ...]:
    """List libraries of the model that was saved; none where its record cannot be read, which loading explains."""
    try:
        inner = json.loads((folder / SAVED).read_bytes())["model"]
        return resolve(rebased(inner, folder, Path.cwd())).libraries
    except (OSError, ValueError, LookupError, TypeError, SourceError):
        return ()


def rebased(text: str, old: Path, new: Path) -> str:
    """Return a MODEL argument whose path is taken from the folder ``old``, as it is given from the folder ``new``.

    Names of zoo models, modules and libraries stay, and so do absolute paths.
    """
    head, separator, rest = text.partition(":")
    path, _, call = _split_call(text)
    if separator and head == "hf":
        given, build = rest, "hf:{}".format
        if not (old / rest).is_dir():
            return text
    elif Path(text).suffix in _SUFFIXES:
        given, build = text, "{}".format
    elif path.endswith(".py"):
        given, build = path, f"{{}}:{call.replace('{', '{{').replace('}', '}}')}".format
    else:
        return text
    expanded = Path(given).expanduser()
    return text if expanded.is_absolute() else build(os.path.relpath(old / expanded, new))


def resolve(text: str) -> Source:
    """Take a MODEL argument apart, and check what can be checked without loading anything.

    Raises:
        SourceError: it is of no known form, or names a file or zoo model that does not exist.
    """
    if len(os.fsencode(text)) > _LONGEST:
        raise SourceError(f"{text[:40]}… is no model: it has {len(text)} characters", "check the argument")
    head, separator, rest = text.partition(":")
    if separator and head in ("hf", "timm"):
        return _library(text, head, rest)
    if suffix := _SUFFIXES.get(Path(text).suffix):
        return Source(form=suffix, text=text, target=str(_existing(text)))
    path, separator, call = _split_call(text)
    if separator and path.endswith(".py"):
        name, args, kwargs = _call(text, call)
        return Source(
            form="file", text=text, target=str(_existing(path)), factory=name, arguments=args, keywords=kwargs
        )
    if separator:
        name, args, kwargs = _call(text, call)
        return Source(form="module", text=text, target=path, factory=name, arguments=args, keywords=kwargs)
    return _zoo(text)


def _split_call(text: str) -> tuple[str, str, str]:
    """Split at the last colon before any parenthesis: ``file.py:build(x='a:b')``."""
    head, parenthesis, arguments = text.partition("(")
    path, separator, name = head.rpartition(":")
    return (path, separator, name + parenthesis + arguments) if separator else (text, "", "")


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if any(len(os.fsencode(part)) > 255 for part in found.parts):
        raise SourceError(f"{path[:40]}… is too long for a file's name", "check the argument")
    if not found.is_file():
        what = "is a folder" if found.is_dir() else "does not exist"
        raise SourceError(
            f"the model file {path!r} {what}", f"check the path; it is taken from the current folder, {Path.cwd()}"
        )
    return found.resolve()


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
        raise SourceError(
            f"cannot read the factory in {text!r}: "
            + (error.msg if isinstance(error, SyntaxError) else "an argument is no literal"),
            "write it as file.py:build or file.py:build(depth=50), with literal arguments",
        ) from error
    raise SourceError(f"cannot read the factory in {text!r}", "write it as file.py:build or file.py:build(depth=50)")


def _library(text: str, form: str, rest: str) -> Source:
    if not rest:
        raise SourceError(f"{text!r} names no model", f"write it as {form}:name")
    if form == "hf":
        folder = Path(rest).expanduser()
        target = str(folder.resolve()) if folder.is_dir() else rest
        if not folder.is_dir() and rest.startswith((".", "/", "~")):
            raise SourceError(f"the folder {rest!r} does not exist", "give a folder with config.json and safetensors")
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise SourceError(f"the folder {rest!r} has no config.json", "save the model there with save_pretrained")
        return Source(form="hf", text=text, target=target)
    if "(" in rest:
        name, _, arguments = rest.partition("(")
        _, _, kwargs = _call(text, f"create({arguments}")
        return Source(form="timm", text=text, target=name, keywords=kwargs)
    return Source(form="timm", text=text, target=rest)


def _zoo(text: str) -> Source:
    name, args, kwargs = _call(text, text) if "(" in text else (text, (), {})
    if name in MODELS:
        return Source(form="zoo", text=text, target=name, factory=name, arguments=args, keywords=kwargs)
    path = Path(text)
    if any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise SourceError(f"{text[:40]}… is no model, and too long for a file's name", "check the argument")
    if path.suffix == ".py":
        raise SourceError(f"{text!r} names a file but no factory", f"add the callable: {text}:build")
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
