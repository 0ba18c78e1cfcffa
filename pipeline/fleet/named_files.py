"""Digests of the files that recipes name: the same name may hold other data the next time."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from enginesmith.calibration.forms import is_embedded
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import file_digest, files_below, folder_digest
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.storage import storage_errors


def digests(recipes: Sequence[Recipe]) -> list[dict[str, str]]:
    """For each recipe by name, as it stands there; names of sets, modules and metrics that are no files are left out.

    Modules that a named file imports are not looked at.

    Raises:
        StoreError: one is there and cannot be read.
    """
    known: dict[str, str | None] = {}
    found = []
    for recipe in recipes:
        names = dict.fromkeys(_named(recipe))
        known |= {name: _digest(name) for name in names if name not in known}
        found.append({name: digest for name in names if (digest := known[name])})
    return found


def _named(recipe: Recipe) -> Iterator[str]:
    for data in (recipe.calibration, recipe.eval_data):
        if data and not is_embedded(data):
            yield data
    for code in (recipe.metric, recipe.recovery.method):
        if code and is_reference(code):
            yield code
    if recipe.data_options.tokenizer:
        yield recipe.data_options.tokenizer
    yield from recipe.tensorrt.plugins


def _digest(name: str) -> str | None:
    path = Path(name.rpartition(":")[0] if is_reference(name) else name).expanduser()
    with storage_errors(f"the file {path}"):
        if path.is_file():
            return file_digest(path)
        if path.is_dir():
            return folder_digest({inner: file_digest(path / inner) for inner in files_below(path)})
    return None
