"""The store of finished steps."""

from pathlib import Path

import click

from enginesmith.pipeline.commands.options import as_json_option
from enginesmith.pipeline.commands.request import shown


@click.group()
def cache() -> None:
    """Look after the store of finished steps."""


_store = click.option("--store", type=click.Path(path_type=Path), help="Folder of the store.")


@cache.command("list")
@_store
@as_json_option
def cache_list(store: Path | None, as_json: bool) -> None:
    """List what is kept, the latest used first.

    Example: enginesmith cache list
    """
    from enginesmith.pipeline import inspection

    shown().show_table(inspection.cached(store), as_json)


@cache.command("verify")
@_store
@as_json_option
def cache_verify(store: Path | None, as_json: bool) -> None:
    """Read everything and remove what is damaged; it is made again when it is needed.

    Example: enginesmith cache verify
    """
    from enginesmith.pipeline.store import Store, default_root

    damaged = Store(store or default_root()).verify()
    shown().show_facts({"damaged": len(damaged), "removed": damaged}, as_json)


@cache.command("prune")
@click.option("--max-size", metavar="SIZE", help="Keep the latest used up to this size.")
@click.option("--max-age", metavar="TIME", help="Remove what was not used for so long: 30d.")
@_store
@as_json_option
def cache_prune(max_size: str | None, max_age: str | None, store: Path | None, as_json: bool) -> None:
    """Remove what was not used lately, and leftovers of processes that were killed.

    Example: enginesmith cache prune --max-size 5GiB --max-age 30d
    """
    from enginesmith.pipeline.store import Store, default_root
    from enginesmith.pipeline.units import parse_bytes, parse_seconds

    removed = Store(store or default_root()).prune(
        max_bytes=parse_bytes(max_size) if max_size else None,
        max_age_seconds=parse_seconds(max_age) if max_age else None,
    )
    shown().show_facts({"removed": len(removed), "freed_bytes": sum(entry.bytes for entry in removed)}, as_json)
