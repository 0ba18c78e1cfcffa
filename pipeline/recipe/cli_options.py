"""Where options of the command line go in a recipe, and what they are called there."""

import re
from collections.abc import Iterator, Mapping

from enginesmith.pipeline.engines import options as engines

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "opset": ("export", "opset"),
    "exporter": ("export", "exporter"),
    "attention": ("export", "attention"),
    "external_data": ("export", "external_data_bytes"),
    "measure_time": ("measure", "seconds"),
    "precision_target": ("measure", "precision"),
    "memory_limit": ("measure", "memory_limit_bytes"),
    **{name: ("measure", name) for name in ("memory", "limits", "profile")},
    "max_drop": ("budgets", "max_drop"),
    "max_memory": ("budgets", "max_memory_bytes"),
    "max_latency": ("budgets", "max_latency_ms"),
    "max_p99": ("budgets", "max_p99_ms"),
    "min_throughput": ("budgets", "min_throughput_per_s"),
    "max_size": ("budgets", "max_size_bytes"),
    "max_build_time": ("budgets", "max_build_seconds"),
    "min_sqnr": ("min_sqnr_db",),
    "search_limit": ("quantisation", "search_limit_seconds"),
    **{
        name: ("quantisation", name)
        for name in (
            "ranges",
            "percentile",
            "placement",
            "weight_bits",
            "keep",
            "smooth",
            "smooth_insert",
            "awq",
            "equalise",
            "bias_correction",
        )
        + ("convert_io", "search_steps")
    },
    **engines.OPTIONS,
    **{name: ("pruning", name) for name in ("importance", "multiple_of", "protect", "heads")},
    "prune_scope": ("pruning", "scope"),
    "prune_steps": ("pruning", "steps"),
    "recover_time": ("recovery", "seconds"),
    "recover_memory": ("recovery", "memory_bytes"),
    **{name: ("data_options", name) for name in ("labels", "tokenizer", "text_field", "max_length")},
    **{
        name: (name,)
        for name in ("inputs", "targets", "engines", "graph_optimization", "device", "threads", "eval_data", "metric")
        + ("precisions", "calibration", "samples", "synthetic_calibration", "eval_samples", "objective", "seed")
        + ("allow_pickle", "passes", "prune", "sparsity")
    },
}
"""Option, as commands call its value → where that goes in the recipe."""
_WITH_WORK: Mapping[str, tuple[str, ...]] = {
    **{name: ("data_options", name) for name in ("resize", "crop", "mean", "std")},
    **{name: (name,) for name in ("batch", "workspace", "recover", "shapes")},
    "concurrency": ("measure", "concurrency"),
    "simplify": ("simplify",),
}
"""The same of those whose values have to be read first, or that are called otherwise."""
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)")
_ENDS = ("", "s", "es", "_data")
"""What a value's name has more than its option: ``--engine`` fills ``engines``, ``--eval`` ``eval_data``."""


def option_for(place: tuple[str, ...]) -> str:
    """Name the option that fills a field of the recipe, or the field itself where there is none for it."""
    known = {value: name for name, value in {**OPTIONS, **_WITH_WORK}.items()}
    name = known.get(place)
    if name is None:
        return ".".join(place)
    if name == place[0]:
        name = name.removesuffix("es" if name.endswith("sses") else "s")
    return "--" + name.replace("_", "-")


def fields_for(text: str) -> list[str]:
    """The fields of a recipe that stand for the options which a text names, as they are written there."""
    return list(dict.fromkeys(_fields(text)))


def _fields(text: str) -> Iterator[str]:
    known = {**OPTIONS, **_WITH_WORK}
    for option in _OPTION.findall(text):
        name = option.replace("-", "_").removeprefix("no_")
        if place := next((known[name + end] for end in _ENDS if name + end in known), None):
            yield ": {".join(place) + ": …" + "}" * (len(place) - 1)
