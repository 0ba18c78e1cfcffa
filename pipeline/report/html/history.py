"""Render what was left out and where the numbers come from: steps, the machine, doing it again."""

from collections.abc import Iterator
from importlib.metadata import version

from enginesmith.pipeline.recipe import commented
from enginesmith.pipeline.report import provenance, tables
from enginesmith.pipeline.report.html.blocks import (
    Block,
    Code,
    Fact,
    Facts,
    Words,
    filled,
    folded,
    points,
    table,
    without_empty,
)
from enginesmith.pipeline.report.html.placing import Placed
from enginesmith.pipeline.run import Run, VariantRecord
from enginesmith.pipeline.units import format_seconds

_TELLING = ("processor", "usable cores", "memory", "system", "kernel", "python", "governor", "turbo", "load average")
_MOST_FACTS = 24
OUT = ("variants", "what", "why")


def render_rejected(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List variants that cannot be used, and why."""
    rejected = [(tables.marked(one), "rejected", one.rejected) for one in run.variants if one.rejected]
    others = [(", ".join(map(tables.marked, found)), _how(found[0]), why) for found, why in tables.by_reason(run)]
    rows = [*rejected, *others]
    found = table("reasons", "Variants that failed, were rejected or are left, with the reason", OUT, rows)
    none = Words("None: every variant was built, held against the baseline and measured.")
    return (found,) if rows else (none,)


def _how(record: VariantRecord) -> str:
    """In a word what became of a variant."""
    if record.status == "failed":
        return f"failed: {record.failure}" if record.failure else "failed"
    return f"{record.status}, with a shortfall" if record.shortfall else record.status


def render_provenance(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the model, the files and every step."""
    steps = table("steps", "Every step of the plan", provenance.STEPS, provenance.steps(run), searched=True)
    files = table("files", "Engine files in the run directory", provenance.FILES, provenance.files(run))
    fields = table("fields", "Fields of each step", provenance.PARAMETERS, provenance.parameters(run))
    return (
        Facts(tuple(_about(run))),
        *(filled(without_empty(files)) or (Words("No engine was built."),)),
        *(folded(f"All {len(run.steps)} steps, with tools and versions", *filled(steps)) or (Words("No step ended."),)),
        *folded("The fields that each step was done with", *filled(fields)),
    )


def _about(run: Run) -> Iterator[Fact]:
    model = run.model
    yield Fact("Model", model.source)
    yield Fact("Digest of the model", model.sha256 or "not recorded")
    if model.signature:
        yield Fact("Inputs", "; ".join(map(str, model.signature.inputs)))
        yield Fact("Outputs", "; ".join(map(str, model.signature.outputs)))
    if model.shapes:
        yield Fact("Shapes (min:opt:max)", ", ".join(f"{name} {range_}" for name, range_ in model.shapes.items()))
    yield Fact("Begun", run.created)
    yield Fact("Took", format_seconds(run.seconds))


def render_environment(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the machine, its warnings and its software."""
    warnings = tuple(f"{one}." for one in run.environment.get("warnings", ()))
    facts = provenance.machine(run.environment)
    known = [Fact(name, text) for name, text in facts if name in _TELLING or name.startswith("GPU")]
    every = table("machine", "The machine when latency was measured", provenance.MACHINE, facts)
    packages = table("packages", "Packages", ("package", "version"), provenance.versions(run.environment).items())
    quiet = Words("Nothing was seen that spoils measurements.", "good")
    unknown = Words("Nothing is known of the machine.", "caution")
    return (
        *(points(warnings, "caution") or (quiet if facts else unknown,)),
        Facts((Fact("device", f"{run.recipe.where}"), *known[:_MOST_FACTS])),
        *folded("Every fact of the machine", *filled(every)),
        *folded("Packages and their versions", *filled(packages)),
    )


def render_reproduction(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List what to install and what to run."""
    known = provenance.versions(run.environment)
    install, python = provenance.install(run.environment), run.environment.get("python")
    own = known.get("enginesmith") or version("enginesmith")
    said = f"In a checkout of enginesmith {own}{f', with Python {python}' if python else ''}:"
    builds = provenance.builds(run.environment)
    build = f"The run was made with {', '.join(builds)}: a build of its own, from the index that offers it."
    unknown = Words("The run does not say which packages it was made with.", "caution")
    return (
        *((Words(said), Code("install", "Install", install)) if install else (unknown,)),
        *([Words(build)] if builds else []),
        Code("command", "Run", provenance.commands(run)),
        *([Words(f"Begun in the folder {run.environment['folder']}.")] if run.environment.get("folder") else []),
        *folded("recipe.yaml: everything that was asked for", Code("recipe", "recipe.yaml", commented(run.recipe))),
    )
