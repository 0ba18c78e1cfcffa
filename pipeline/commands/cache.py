"""Manage the store of finished steps."""

from typing import TYPE_CHECKING

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.errors import UsageError

if TYPE_CHECKING:
    from enginesmith.pipeline.store.store import Store


@click.group()
def cache() -> None:
    """Manage the store of finished steps."""


_which = parameters.together(
    parameters.store_option, click.option("--local", is_flag=True, help="Only this machine's copy of a shared store.")
)


@cache.command("list")
@_which
@parameters.as_json_option
def cache_list(store: str | None, local: bool, as_json: bool) -> None:
    """List the stored steps, the most recently used first.

    Example: enginesmith cache list
    """
    from enginesmith.pipeline.units import format_bytes
    from enginesmith.pipeline.workflows import inspect

    opened = _open_store(store, local)
    context.terminal().show_table(inspect.list_entries(opened), as_json)
    if not as_json:
        click.echo(f"total: {format_bytes(opened.size())}")


@cache.command("verify")
@_which
@parameters.as_json_option
def cache_verify(store: str | None, local: bool, as_json: bool) -> None:
    """Read every entry and remove damaged ones; they are made again when needed.

    Example: enginesmith cache verify
    """
    damaged = _open_store(store, local).verify()
    context.terminal().show_facts({"damaged": len(damaged), "removed": damaged}, as_json)


@cache.command("prune")
@click.option("--max-size", callback=parameters.SIZE, metavar="SIZE", help="Keep what was used last, up to this size.")
@click.option("--max-age", callback=parameters.TIME, metavar="TIME", help="Remove entries not used for this long: 30d.")
@_which
@parameters.as_json_option
def cache_prune(max_size: int | None, max_age: float | None, store: str | None, local: bool, as_json: bool) -> None:
    """Remove old entries, and leftovers of killed processes.

    What a run in progress on this machine has used stays. --store names a shared store; the other machines that use it
    lose the entries, too.

    Example: enginesmith cache prune --max-size 5GiB --max-age 30d
    """
    from enginesmith.pipeline.store.address import default_address
    from enginesmith.pipeline.store.manifest import SMALL_FILE
    from enginesmith.pipeline.units import format_bytes

    if store is None and not local and default_address().url:
        raise UsageError(
            f"$ENGINESMITH_STORE is {default_address().text}, which others use, too",
            "say which one: --local for what this machine keeps of it, --store URL for the store itself",
        )
    opened = _open_store(store, local)
    removed = opened.prune(max_bytes=max_size, max_age_seconds=max_age)
    files = sum(entry.kind == SMALL_FILE for entry in removed)
    sizes = {"freed": sum(entry.bytes for entry in removed), "left": opened.size()}
    facts: dict[str, object] = {"removed": len(removed) - files, "removed_files": files}
    facts |= {f"{key}_bytes" if as_json else key: n if as_json else format_bytes(n) for key, n in sizes.items()}
    context.terminal().show_facts(facts, as_json)


def _open_store(store: str | None, local: bool) -> "Store":
    from enginesmith.pipeline.store.address import default_address, parse_address
    from enginesmith.pipeline.store.store import Store

    address = parse_address(store) if store else default_address()
    if store and not address.url and not (address.folder / "objects").is_dir():
        raise UsageError(f"there is no store in {address.folder}", "check the path of --store")
    return Store(address.folder if local else address.text, make=False)
