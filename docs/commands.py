"""Write docs/cli.md, the reference of the command line, from the commands: run by `make documents`."""

from collections.abc import Iterator

import click

from enginesmith.cli import _SECTIONS
from enginesmith.pipeline.commands import parameters
from enginesmith.pipeline.recipe.cli_options import list_options

_HEAD = """# Commands

Written by `make documents` from the help of each command: `enginesmith COMMAND --help` shows the same; `--help-all`
also shows the options for special cases (*in italics* here). `enginesmith --debug COMMAND` shows the whole
trace of an error. With `--json` a command writes one JSON document to standard output, and everything else to standard
error. Exit codes: [stability.md](stability.md#exit-codes). MODEL and the recipe's fields: [recipe.md](recipe.md).

These options may be repeated: {repeatable}.
"""


def command_reference() -> str:
    """Write the reference as Markdown."""
    repeatable = (f"`{row['flags']}`" for row in list_options() if row["kind"] in ("list", "mapping"))
    lines = [_HEAD.format(repeatable=", ".join(repeatable))]
    for heading, commands in _SECTIONS.items():
        lines += [f"\n## {heading}\n"]
        for command in commands:
            lines += _describe(command, command.name or "", 3)
    return "".join(lines)


def _describe(command: click.Command, path: str, level: int) -> Iterator[str]:
    """Write a command's usage, its help and its options; then those of the commands in it."""
    context = click.Context(command, info_name=f"enginesmith {path}")
    usage = " ".join([f"enginesmith {path}", *command.collect_usage_pieces(context)])
    yield f"\n{'#' * level} {path}\n\n`{usage}`\n"
    for paragraph in (command.help or "").replace("\b", "").split("\n\n"):
        text = " ".join(paragraph.split())
        yield f"\nExample: `{text[9:]}`\n" if text.startswith("Example: ") else f"\n{_escape(text)}\n"
    options = [param for param in command.params if isinstance(param, click.Option) and param.opts[0] != "--help-all"]
    headings = ["Options", *parameters._HEADINGS]
    for heading in headings:
        rows = [option for option in options if (getattr(option, "heading", "") or "Options") == heading]
        rows.sort(key=lambda option: getattr(option, "advanced", False))
        if rows:
            yield f"\n| {heading} | |\n| --- | --- |\n"
        for option in rows:
            name, meaning = option.get_help_record(context) or ("", "")
            meaning = f"*{_escape(meaning)}*" if getattr(option, "advanced", False) else _escape(meaning)
            yield f"| `{name.replace('|', chr(92) + '|')}` | {meaning} |\n"
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from _describe(part, f"{path} {name}", level + 1)


def _escape(text: str) -> str:
    """Keep what Markdown would take for markup."""
    return text.replace("*", "\\*").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(command_reference(), end="")
