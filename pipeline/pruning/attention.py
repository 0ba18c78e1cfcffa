"""Groups that are split into attention heads: a unit is a head, and modules may count heads beside their weights."""

from collections.abc import Iterator
from dataclasses import replace

from enginesmith.pipeline.pruning.cutting import Parts
from enginesmith.pipeline.pruning.structure import Attribute, Group


def of_heads(group: Group, parts: Parts) -> tuple[Group, ...]:
    """The ways in which a group may be made of heads, the most likely first; nothing where it is no attention.

    More than one is possible where the shapes of the products fit several numbers of heads, and as nobody knows which
    numbers a forward reads: which is right is found out by trying.
    """
    ways = []
    for size in _head_sizes(group):
        heads = group.width // size
        if heads < 2 or group.units != group.width:
            continue
        units = tuple(tuple(range(head * size, (head + 1) * size)) for head in range(heads))
        slices = tuple(
            replace(
                one, indices=tuple(tuple(index for channel in unit for index in one.indices[channel]) for unit in units)
            )
            for one in group.slices
        )
        made = replace(group, unit="head", channels=units, slices=slices)
        ways += [replace(made, attributes=attributes) for attributes in _attributes(made, parts, heads, size)]
    return tuple(ways)


def is_attention(group: Group) -> bool:
    """Whether two values that are made of inputs are multiplied on the way."""
    return any(True for _ in _products(group))


def _products(group: Group) -> Iterator[tuple[str, object]]:
    for dep, _ in group.traced:
        name = str(getattr(dep.target.module, "_grad_fn", ""))
        if "ScaledDotProduct" in name or "BmmBackward" in name:
            yield name, dep.target.grad_fn


def _head_sizes(group: Group) -> list[int]:
    """Channels of one head, as far as the products tell."""
    found: list[int] = []
    for name, product in _products(group):
        if "ScaledDotProduct" in name:
            found.append(int(product._saved_query.shape[-1]))  # type: ignore[attr-defined]
            continue
        for leaf in ("_saved_mat2", "_saved_self"):
            matrix = getattr(product, leaf, None)
            if matrix is not None:
                found += [int(size) for size in matrix.shape[1:]]
    return [size for size in dict.fromkeys(found) if size < group.width and group.width % size == 0]


def _attributes(group: Group, parts: Parts, heads: int, size: int) -> list[tuple[Attribute, ...]]:
    """Numbers to change: those of heads; also those of the width beside them; or none."""
    counts, widths = [], []
    for path, module in parts.modules.items():
        if not _within(path, _shared(group.modules)) or type(module).__module__.startswith("torch.nn"):
            continue
        numbers = {name: value for name, value in vars(module).items() if type(value) is int}
        own = [
            Attribute(path, name, 1)
            for name, value in numbers.items()
            if "head" in name and value == heads and "dim" not in name and "size" not in name
        ]
        own += [
            Attribute(path, name, size) for name, value in numbers.items() if "head" in name and value == group.width
        ]
        counts += own
        if own:
            widths += [
                Attribute(path, name, size)
                for name, value in numbers.items()
                if value == group.width and "head" not in name
            ]
    choices = [tuple(counts), (*counts, *widths), ()]
    return list(dict.fromkeys(choices))


def _shared(modules: tuple[str, ...]) -> str:
    """The closest module that all are within."""
    paths = [path.split(".")[:-1] for path in modules]
    common = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
