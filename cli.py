"""Run the command line: list the commands, and end with a message and an exit code. Nothing heavy is imported here."""

import io
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from enginesmith.pipeline.commands import (
    benchmark,
    build,
    cache,
    compare,
    doctor,
    explain,
    export,
    fit,
    gate,
    init,
    inspect,
    models_and_engines,
    optimize,
    package,
    precision,
    prosecute,
    prune_and_sparsify,
    report,
    resume,
    simplify,
    verify,
)
from enginesmith.pipeline.errors import EnginesmithError, explain_errno, explain_import

_INTERRUPTED = 130
_ERRORS = 2
"""Descriptor of the standard stream for progress and errors."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_SECTIONS = {
    "Optimize a model": (optimize.optimize, resume.resume, init.init),
    "Read and judge a run": (report.report, explain.explain, compare.compare, gate.gate, package.package),
    "Single stages": (
        *(export.export, simplify.simplify, precision.precision, prune_and_sparsify.prune),
        *(prune_and_sparsify.sparsify, build.build, verify.verify, prosecute.prosecute, benchmark.benchmark, fit.fit),
    ),
    "Look around": (
        *(inspect.inspect_file, doctor.doctor, models_and_engines.models, models_and_engines.engines, cache.cache),
    ),
}
"""Heading of ``--help`` → the commands below it."""


class _Commands(click.Group):
    """Commands whose errors become one clear message and an exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, a section for each kind."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading, commands in _SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(subcommand.name or "", subcommand.get_short_help_str(width)) for subcommand in commands]
                )

    def main(self, args: Sequence[str] | None = None, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        _prepare_output()
        try:
            result = super().main(args, **{**kwargs, "standalone_mode": False})
            sys.exit(result if isinstance(result, int) else 0)
        except click.ClickException as error:
            error.show()
            failure = {"error": error.format_message(), "remedy": "", "exit_code": error.exit_code}
            code, failure = error.exit_code, failure | {"class": "UsageError", "failure": ""}
        except (click.Abort, KeyboardInterrupt) as interrupt:
            click.echo(f"interrupted{interrupt.__cause__ or interrupt}", err=True)
            sys.exit(_INTERRUPTED)
        except (EnginesmithError, ImportError) as raised:
            cause = explain_import(raised) if isinstance(raised, ImportError) else raised
            if "--debug" in given or cause is None:
                raise
            cause.remedy += self._name_owners(cause.remedy, given)
            click.echo(f"error: {cause}", err=True)
            failure = {"error": cause.message, "remedy": cause.remedy, "exit_code": cause.exit_code}
            code, failure = cause.exit_code, failure | {"class": type(cause).__name__, "failure": cause.failure}
        if "--json" in given:
            click.echo(json.dumps(failure, indent=1))
        sys.exit(code)

    def _name_owners(self, remedy: str, given: Sequence[str]) -> str:
        """Say whose an option is that a remedy names, where the given command lacks it and no owner is named."""
        options = {name: _list_options(command) for name, command in self.commands.items()}
        own = next((options[word] for word in given if word in options), set())
        notes = []
        for flag in dict.fromkeys(_FLAG.findall(remedy)):
            owners = [name for name, flags in options.items() if flag in flags]
            if flag not in own and owners and not set(owners) & set(re.findall(r"[\w-]+", remedy)):
                notes.append(f"{flag} is an option of {', '.join(owners)}")
        return f" ({'; '.join(notes)})" if notes else ""


class _Unbroken(io.FileIO):
    """Write where a stream goes; once that fails, write nowhere, so that the command does its work to the end."""

    def write(self, data: Any, /) -> int:
        """Write all or a part of it; what nobody reads counts as written.

        Raises:
            StoreError: results cannot be written, because a disk is full, say.
        """
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if isinstance(error, BrokenPipeError) or self.fileno() == _ERRORS:
                return len(data)
            raise explain_errno(error, "standard output", "send it to") from error


def _prepare_output() -> None:
    """Have output that nobody takes go nowhere, and escape what the terminal's encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for all that is printed
        elif stream is getattr(sys, f"__{name}__"):  # of the process, and not of a program that calls this
            stream.flush()
            raw = _Unbroken(stream.fileno(), "w", closefd=False)
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=stream.line_buffering
                ),
            )
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _list_options(command: click.Command) -> set[str]:
    """List the options of a command, or of all commands of a group."""
    if isinstance(command, click.Group):
        return set().union(*map(_list_options, command.commands.values()))
    return {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="enginesmith")
@click.option("--debug", is_flag=True, help="Show the whole trace of an error.")
def main(debug: bool) -> None:
    """Make the fastest inference engine that fits a memory and an accuracy budget, and prove it.

    \b
    enginesmith optimize digits
    enginesmith optimize net.py:build --batch 1,8,64 --max-memory 2GiB
    enginesmith export hf:./my-bert -o bert.onnx
    """
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


for command in (command for commands in _SECTIONS.values() for command in commands):
    main.add_command(command)


if __name__ == "__main__":
    main()
