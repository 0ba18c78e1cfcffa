"""A loaded engine in the place of a module."""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import CallError, ShapeError, UsageError, warn_caller
from enginesmith.pipeline.tensors import Constant, is_same

_NAMES_OUTPUTS = "return_dict"
"""Switch of transformers that asks for outputs by name."""
_MORE_OUTPUTS = ("output_", "use_cache")
"""Beginnings of the names of switches of transformers that ask for outputs besides."""
_REST = Parameter("kwargs", Parameter.VAR_KEYWORD)
"""Keywords of any name, as transformers looks for them."""


class Replacement(nn.Module):
    """Call a loaded engine as a module; calls that it does not take go to the original, if that is there.

    These are calls with shapes that the engine does not take, without one of its inputs, or with a keyword that is no
    input of it and asks for something else than the engine computes.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        eager: nn.Module | None = None,
        device: object = "cpu",
        inputs: Sequence[str] = (),
        *,
        names_outputs: bool = False,
        constants: Mapping[str, Constant] = MappingProxyType({}),
    ) -> None:
        """Put ``model`` in the place of ``eager``, the original, which is put into evaluation mode.

        ``device`` is the engine's, and ``inputs`` are the names of its inputs. ``names_outputs``: it answers by name.
        ``constants`` are arguments that the engine's module was always called with beside them.

        Raises:
            UsageError: ``eager`` is no module.
        """
        if not isinstance(eager, nn.Module | None):
            raise UsageError(f"eager: must be a torch module (given: {eager!r})", "give the original, or leave it out")
        super().__init__()
        place = str(device) if torch.cuda.is_available() else "cpu"
        self.model, self.original, self._place = model, eager, torch.empty(0, device=place)
        self._inputs, self._names_outputs, self._constants = tuple(inputs), names_outputs, dict(constants)
        self._fallbacks = _Fallbacks()
        self._prepare()
        self.eval()

    def _prepare(self) -> None:
        """Make what is not pickled.

        ``forward`` shows the parameters of the original, as callers give what they see there, and ``torch.compile``
        around this module does not look into it: there may be a module in the engine. It does not refer to this module,
        which is freed where it is dropped, with the engine.
        """
        caller = _Caller(self._inputs, self._names_outputs, self._constants, self.original)
        answer = functools.partial(_answer, caller, self.model, self.original, self._fallbacks)
        self.forward = torch.compiler.disable(answer)  # type: ignore[no-untyped-call]
        self.forward.__signature__ = caller.signature  # type: ignore[attr-defined]

    @property
    def fallbacks(self) -> int:
        """Count of calls that the original answered."""
        return self._fallbacks.count

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, as an engine does: what it is part of may be trained around it."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse to be moved or cast: ``fn`` is what ``to``, ``half`` and the like do with each tensor."""
        try:
            moved = fn(self._place)
        except (AssertionError, RuntimeError) as error:  # by torch: it cannot use that device here
            raise self._refuse_move() from error
        if (moved.device, moved.dtype) != (self._place.device, self._place.dtype):
            raise self._refuse_move()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _refuse_move(self) -> UsageError:
        message = f"an engine stays on {self._place.device} with the types that it was built with"
        return UsageError(message, "move or cast the other modules, and load the engine with device=… for another one")

    def __getattr__(self, name: str) -> Any:
        """Look up what an engine does not have in the original: its ``config``, say.

        The original's methods call the original; where they run it, that is counted as a fallback.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_modules", {}).get("original")
            if original is None:
                remedy = "give the module that it takes the place of, as_module(original), to look it up there"
                raise AttributeError(f"an engine has no attribute {name!r}: {remedy}") from None
            attribute = getattr(original, name)
            mine = getattr(attribute, "__self__", None) is original
            return self._count_within(original, attribute) if mine else attribute

    def _count_within(self, original: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the original, so that its own calls of the original are counted, not those of others."""

        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            reason = f"{method.__name__}() is a method of the original module and runs that, not the engine"
            thread = threading.get_ident()

            def count(*_: object) -> None:
                if threading.get_ident() == thread:
                    self._fallbacks.add(reason)

            with original.register_forward_pre_hook(count):
                return method(*arguments, **named)

        return call


def _answer(
    caller: "_Caller",
    model: Callable[..., Any],
    original: nn.Module | None,
    fallbacks: "_Fallbacks",
    *arguments: Any,
    **named: Any,
) -> Any:
    """Run the engine; count the calls that it leaves to the original, and warn of the first.

    Raises:
        CallError: the original takes no such call; or there is none, and an input is missing, or a keyword asks for
            what is not in the engine.
        ShapeError: there is no original, and the engine does not take these shapes.
        SignatureError: the types of the inputs do not fit.
    """
    try:
        given, by_name = caller.fit(arguments, named)
        return model(*given, **by_name)
    except (CallError, ShapeError) as error:
        if original is None:
            raise
        caller.check(arguments, named)
        fallbacks.add(f"the engine does not take this call, so the original module answers: {error.message}")
    with torch.no_grad():
        return original(*arguments, **named)


class _Fallbacks:
    """Count calls that the original answers, and warn of the first."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, reason: str) -> None:
        with _counting:
            self.count += 1
            first = self.count == 1
        if first:
            warn_caller(f"{reason}; further such calls are counted (fallbacks) and not told")


class _Caller:
    """Make the arguments that a module is called with those of the engine in its place."""

    def __init__(
        self,
        inputs: tuple[str, ...],
        names_outputs: bool,
        constants: Mapping[str, Constant],
        eager: nn.Module | None,
    ) -> None:
        """``inputs`` and ``constants`` are the engine's; with no inputs, calls stay as they are."""
        self._inputs, self._names_outputs, self._constants = inputs, names_outputs, constants
        self._has_original = eager is not None
        self.signature = _read_signature(eager, inputs)
        self._parameters = self.signature.parameters
        ordered = [name for name, each in self._parameters.items() if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
        self._same_names = eager is not None and {*inputs} <= {*ordered}
        self._same_order = tuple(ordered[: len(inputs)]) == inputs

    def check(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Check that the original has parameters for a call; CallError if it has not."""
        try:
            self.signature.bind(*arguments, **named)
        except TypeError as error:
            names = ", ".join(name for name, each in self._parameters.items() if each.kind is not Parameter.VAR_KEYWORD)
            message = f"the original module's parameters are {names}, and a call does not fit them: {error}"
            raise CallError(message, "give each once, in this order or by name") from error

    def fit(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Leave out keywords that change nothing, and name arguments whose order is not that of the engine's inputs."""
        if arguments and self._same_names and (not self._same_order or len(arguments) > len(self._inputs)):
            self.check(arguments, named)
            bound = self.signature.bind(*arguments, **named)
            rest = {name for name in bound.arguments if self._parameters[name].kind is Parameter.VAR_KEYWORD}
            named = {name: value for name, value in bound.arguments.items() if name not in rest}
            arguments = ()
            for name in rest:
                named |= bound.arguments[name]
        if self._has_original:
            self._check_constants(named)
        if named.keys() <= {*self._inputs}:
            return arguments, named
        kept = [name for name, value in named.items() if name in self._inputs or not self._is_usual(name, value)]
        for name in kept:
            if named[name] is None and name not in self._inputs:  # which a loaded engine leaves out
                message = f"{name} is None, and the engine computes what the module does without {name}"
                raise CallError(message, "leave it out, or give the default")
        return arguments, {name: named[name] for name in kept}

    def _check_constants(self, named: Mapping[str, Any]) -> None:
        """Refuse a call without an argument that the engine's module had, where the original's default is another."""
        for name, value in self._constants.items():
            default = self._parameters[name].default if name in self._parameters else None
            if name not in named and not is_same(default, value):
                message = f"{name} is left out, and the engine computes what the module does with {name}={value!r}"
                raise CallError(message, f"give {name}={value!r}")

    def _is_usual(self, name: str, value: Any) -> bool:
        """Tell whether a keyword that is no input asks for nothing but what the engine computes."""
        if name in self._constants:
            return is_same(value, self._constants[name])
        if name == _NAMES_OUTPUTS:
            return value is None or value is self._names_outputs
        known = name in self._parameters
        if not known and not any(each.kind is Parameter.VAR_KEYWORD for each in self._parameters.values()):
            return False
        default = self._parameters[name].default if known else None
        if isinstance(value, (bool, int, float, str)) and type(default) is type(value):
            return bool(default == value)
        return default is None and (value is None or (value is False and name.startswith(_MORE_OUTPUTS)))


def _read_signature(eager: nn.Module | None, inputs: Sequence[str]) -> Signature:
    """Read the parameters of the original; without one, make them of the engine's inputs."""
    try:
        if eager is not None:
            return inspect.signature(eager.forward)
        made = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]
    except ValueError:  # it is not written in Python; or names that no parameter can have
        made = [Parameter("arguments", Parameter.VAR_POSITIONAL)]
    return Signature([*made, _REST])


_counting = threading.Lock()
"""Not of a module's own, which is copied and pickled."""
