"""Runs that nobody measured: small ones, with every field filled, with one text in all of them, and very large ones."""

import types
import typing
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.frameworks.records import PrunedGroup, PruningFacts
from enginesmith.pipeline.passes.finetune.options import Point, Recovery, TrainingPlan
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.results.run import ModelRecord, Run, VariantRecord

TEXT = "text"

_GROUP = PrunedGroup(
    step=1, root="conv1", members=("conv1",), unit="channel", before=16, after=8, kept=(0,), importance="l2", width=1
)
PRUNING = PruningFacts(
    target="macs=-50%",
    importance="l2",
    scope="global",
    macs_before=1000,
    macs_after=497,
    parameters_before=400,
    parameters_after=210,
    channels_before=16,
    channels_after=8,
    groups=(_GROUP,),
    whole={"fc": "its outputs are the model's"},
)
_PLAN = TrainingPlan(
    steps=20, batch=64, micro_batch=64, evaluate_every=10, judged=240, statistics=64, processes=1, threads=2
)
RECOVERY = Recovery(
    method="distil",
    metric="top1",
    teacher=1.0,
    before=0.47,
    after=0.99,
    best_step=20,
    steps=20,
    ending="planned",
    reason="all 20 planned steps are done",
    samples=960,
    held_back=240,
    data="digits",
    plan=_PLAN,
    curve=tuple(
        Point(step=step, loss=None if step == 0 else 0.1, metric=metric, held_back_loss=0.1, learning_rate=1e-3)
        for step, metric in ((0, 0.47), (10, 0.98), (20, 0.99))
    ),
)


def variant(name: str, **fields: Any) -> VariantRecord:
    """A measured variant of ONNX Runtime in fp32."""
    values = {"id": name, "engine": "onnxruntime", "precision": "fp32", "status": "measured"}
    return VariantRecord.model_validate(values | fields)


def small(baseline: VariantRecord, /, *variants: VariantRecord, **changes: Any) -> Run:
    """A finished run of digits with these variants, of which the one called a won; ``changes`` are other fields."""
    values = {
        "name": "demo",
        "created": "2026-01-01T00:00:00+00:00",
        "seconds": 1.5,
        "complete": True,
        "recipe": make({"model": "digits"}, listed=True),
        "environment": {},
        "model": ModelRecord(source="digits", signature=None, data="digits"),
        "steps": (),
        "baseline": baseline,
        "variants": variants,
        "winner": "a",
        "pareto": (),
        "verdicts": (),
    }
    return Run.model_validate({**values, **changes})


def filled(kind: Any, text: str) -> Any:
    """Something of the type in which no field is empty, no number 0, and every free text is ``text``."""
    origin, inner = get_origin(kind), [one for one in get_args(kind) if one is not type(None)]
    if origin in (typing.Union, types.UnionType):
        return filled(inner[0], text)
    if origin is Literal:
        return inner[0]
    if origin is typing.Annotated:
        return filled(inner[0], text)
    if origin in (tuple, list):
        return [filled(one, text) for one in inner if one is not Ellipsis]
    if origin is dict:
        return {text: filled(inner[1], text)}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _model(kind, text)
    return {str: text, int: 3, float: 1.5, bool: True}.get(kind, text)


def _model(kind: type[BaseModel], text: str) -> dict[str, Any]:
    """Its fields by alias; those that do not take the text have their default."""
    values = {part.alias or name: filled(part.rebuild_annotation(), text) for name, part in kind.model_fields.items()}
    for _ in tuple(values):
        try:
            kind.model_validate(values)
        except ValidationError as error:
            for place in {str(one["loc"][0]) for one in error.errors()}:
                values.pop(place, None)
        else:
            break
    return values


def run(text: str = TEXT, count: int = 2, **changes: Any) -> Run:
    """A run of so many variants with every field filled; each record's texts begin with its number."""
    values = _model(Run, text)
    records = [_record(values["baseline"], f"{number}{text}") for number in range(count + 1)]
    recipe = {**Recipe(model="digits").model_dump(), "model": text, "calibration": text, "eval_data": text}
    recipe |= {"batch": (3,), "metric": text}
    environment = {"processor": text, text: text, "warnings": [text], "reasons": {text: text}, "gpus": [{"name": text}]}
    environment |= {"packages": {text: text}, "folder": text, "python": text, "memory_bytes": 1 << 30, "turbo": None}
    values |= {"recipe": recipe, "environment": environment, "baseline": records[0], "variants": records[1:]}
    values |= {"winner": records[1]["id"], "pareto": [records[1]["id"]], "complete": True}
    return Run.model_validate({**values, **changes})


def _record(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A record of that name, measured, with its own name where records name themselves."""
    profile = [{**one, "variant": name} for one in values["profile"]]
    return {**values, "id": name, "status": "measured", "rejected": "", "profile": profile}


def large(variants: int = 200, operators: int = 10_000) -> Run:
    """Make so many variants, of which some have an assignment and a profile of as many operators."""
    some = run(count=variants)
    assigned = [
        {"group": f"node_Conv_{number}", "module": f"encoder.layer.{number}.attention.output", "operator": "Conv"}
        | {"precision": "fp32" if number % 100 == 0 else "int8", "why": f"reason {number % 7}", "sqnr_db": number / 100}
        for number in range(operators)
    ]
    rows = [
        {"module": f"encoder.layer.{number}", "modules": [f"encoder.layer.{number}"], "operators": {"Conv": 1}}
        | {"calls": 1, "ms": 1 / (number + 1), "share": 0.01, "precision": "int8"}
        for number in range(operators)
    ]
    values = some.model_dump(by_alias=True)
    for number, record in enumerate(values["variants"]):
        record["precision"] = "int8"
        record["assignment"] = [{**one, "why": f"{one['why']} {number % 3}"} for one in assigned] if number < 6 else []
        record["profile"] = [{**record["profile"][0], "rows": rows}] if number < 2 else []
    values["baseline"]["profile"] = [{**values["baseline"]["profile"][0], "rows": rows}]
    return Run.model_validate(values)
