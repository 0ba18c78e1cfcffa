"""Check a run against budgets and a baseline run."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.errors import EnginesmithError

if TYPE_CHECKING:
    from enginesmith.pipeline.recipe import Recipe
    from enginesmith.pipeline.results.gate import Demands
    from enginesmith.pipeline.results.gate_report import FleetGate, Gate


class _GateCommand(click.Command):
    """Remove an earlier verdict from RUN where the command ends with an error, also of its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _withdraw_verdict(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _withdraw_verdict(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _withdraw_verdict(ctx: click.Context) -> Iterator[None]:
    """Remove the verdict in RUN on an error; an unknown option is one before anybody knows what RUN is."""
    try:
        yield
    except (EnginesmithError, click.UsageError):
        if run := ctx.params.get("run"):
            _write_reports(None, run)
        raise


@click.command(cls=_GateCommand)
@click.argument("run", type=parameters.PATH, is_eager=True)
@parameters.with_budgets
@click.option("--variant", metavar="ID", help="Which variant is judged; default: the winner.")
@click.option("--baseline", type=parameters.PATH, metavar="RUN", help="The run that this one is compared with.")
@click.option("--tolerance", default="5%", show_default=True, help="How much worse than the baseline a number may be.")
@click.option("--update-baseline", is_flag=True, help="If the budgets are met, make RUN the baseline.")
@click.option(
    "--measure-time", callback=parameters.TIME, metavar="TIME", help="Time to measure both again; default 20s."
)
@click.option("--no-measure", is_flag=True, help="Compare stored numbers only, which is less precise.")
@click.option(
    "--trust",
    is_flag=True,
    help="Measure machine code (aotinductor, TensorRT with host code) again, too: you trust who made both runs.",
)
@click.option("--any-machine", is_flag=True, help="Compare latency also where it was measured on other machines.")
@click.option("--strict", is_flag=True, help="Fail on everything that could not be judged.")
@click.option("--quiet", is_flag=True, help="No progress on standard error.")
@parameters.as_json_option
def gate(
    run: Path,
    variant: str | None,
    baseline: Path | None,
    update_baseline: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Check a run or a fleet against budgets and a baseline run.

    The exit code is 3 if a budget is exceeded or could not be judged, or a number is worse than in the baseline run.
    A difference from the baseline without a reliable interval is not judged: the exit code is 3 if its estimate is
    beyond the tolerance, and with --strict in any case. It is 1 if every requested engine failed, or nothing was
    measured.

    Budgets are those of the run's recipe, and those given here, which stand instead of the recipe's of the same kind,
    also where they are looser. A regression is a number that is worse than the baseline by more than the tolerance,
    and statistically significant. Both engines are measured again, side by side, if this machine can run them.

    The checks are written to gate.json in RUN, and shown in its report.html, report.md (fleet.html, fleet.md) and
    junit.xml. If gate ends with an error, such as a baseline that does not exist, it removes an earlier gate.json.

    With --update-baseline only the budgets are checked: if they are met, RUN replaces the baseline. The baseline of a
    fleet is a fleet, entry by entry.

    Example: enginesmith gate runs/net --max-latency 5ms --baseline runs/main --tolerance 5%
    """
    from enginesmith.pipeline.report import gate as texts
    from enginesmith.pipeline.results import fleet as records

    if update_baseline and baseline is None:
        raise click.UsageError("--update-baseline needs --baseline DIR, the folder to put it in")
    if variant is not None and records.is_fleet(run):
        raise click.UsageError(f"--variant is of one run: give one of those in {run}/{records.RUNS}")
    verdict = _judge(run, variant, baseline, update_baseline, partial(_demands, options=options, quiet=quiet))
    _write_reports(verdict, run)
    if as_json:
        context.terminal().print_json(verdict.model_dump(mode="json", by_alias=True))
        return verdict.exit_code
    for line in texts.list_lines(verdict):
        click.echo(line)
    context.announce("gate", texts.list_failures(verdict), texts.list_cautions(verdict), texts.render(verdict))
    return verdict.exit_code


def _judge(
    run: Path, variant: str | None, baseline: Path | None, update: bool, demands_of: "Callable[[Recipe], Demands]"
) -> "Gate | FleetGate":
    """Judge a run or a fleet; with ``update`` it becomes the baseline if its budgets are met."""
    from enginesmith.pipeline.results import fleet as records
    from enginesmith.pipeline.results import gate as gates
    from enginesmith.pipeline.results import run as runs
    from enginesmith.pipeline.results.gate_report import FleetGate, Gate
    from enginesmith.pipeline.workflows import fleet as fleets

    is_fleet = records.is_fleet(run)
    judge: Callable[..., Gate | FleetGate]
    if is_fleet:
        judge = partial(fleets.gate, run, demands_of)
    else:
        judge = partial(gates.gate, run, demands_of(runs.read(run).recipe), variant)
    if not update or baseline is None:
        return judge(baseline=baseline)
    gates.check_replaceable(run, baseline, records.read if is_fleet else runs.read)
    verdict = judge()
    passed = not verdict.exit_code
    source = gates.stored_in(run, verdict.variant) if isinstance(verdict, Gate) and passed else None
    if not passed or not (is_fleet or source):
        return verdict
    fleets.keep(run, baseline) if source is None else gates.keep(source, baseline)
    return verdict.model_copy(update={"baseline": str(baseline), "updated": True})


def _write_reports(verdict: "Gate | FleetGate | None", run: Path) -> None:
    """Put the checks into the reports of the run or fleet that was judged, where its folder can be written.

    None is for a gate that ended with an error: the reports do not show an earlier one any more.
    """
    from enginesmith.pipeline.report.fleet import write_again
    from enginesmith.pipeline.results import gate_report

    folder = run.parent if run.is_file() else run
    try:
        if verdict is not None:
            gate_report.save(verdict, folder)
        elif gate_report.load(folder) is not None:
            (folder / gate_report.FILE).unlink()
        else:
            return
        write_again(run)
    except (EnginesmithError, OSError) as error:  # what was judged, and the exit code, are worth more than the reports
        click.echo(f"note: the reports were not written: {error}", err=True)


def _demands(recipe: "Recipe", options: dict[str, Any], quiet: bool) -> "Demands":
    """Combine the budgets of a recipe and the options with the rules for regressions."""
    from enginesmith.pipeline.results.gate import DEFAULT_SECONDS, Demands, parse_tolerance

    seconds = DEFAULT_SECONDS if options["measure_time"] is None else options["measure_time"]
    if seconds <= 0:
        raise click.BadParameter("there is no measuring in no time", param_hint="--measure-time")
    budgets, min_sqnr_db = context.budgets_of(recipe, options)
    return Demands(
        budgets=budgets,
        min_sqnr_db=min_sqnr_db,
        tolerance=parse_tolerance(options["tolerance"]),
        any_machine=options["any_machine"],
        strict=options["strict"],
        trust=options["trust"],
        measure=not options["no_measure"],
        seconds=seconds,
        progress=lambda text: None if quiet else click.echo(text, err=True),
    )
