"""How the run's numbers were taken, in short; docs/measurement.md has the whole of it."""

from enginesmith.pipeline.report.html.blocks import Block, Points, Words
from enginesmith.pipeline.report.html.placing import Placed
from enginesmith.pipeline.run import Run

_LATENCY = (
    "Latency: the host's monotonic clock around enqueueing and synchronising, the same for eager and every engine. "
    "Inputs are in place before, outputs are fetched after. On CUDA, events on the stream stand beside it.",
    "All variants take turns in shuffled rounds, each in a process of its own, and the processes are started anew "
    "several times (launches). Speed-up is the median over rounds of the paired ratio; its 95 % interval is over "
    "launches.",
)
_REST = (
    "Calls around which a session's threads waited for a core are disturbed: medians and speed-ups leave them out, "
    "percentiles do not. A percentile is given only with enough samples behind it.",
    "Memory: one session alone in a fresh process, at the largest batch size. On the CPU it is growth over the loaded "
    "libraries; on CUDA torch's caching allocator counts it for every engine.",
    "Fidelity: the outputs of each stage against eager's in float32 on the same samples, at the smallest, usual and "
    "largest shape. Accuracy: the metric on labelled data, paired by sample.",
)


def render_method(run: Run, placed: Placed) -> tuple[Block, ...]:
    """Describe the clock, the rounds, and what counts as memory."""
    where, count = run.recipe.where, run.recipe.where.thread_count
    device = f"Measured on {where} with {count} thread{'s' if count != 1 else ''} a session."
    return (
        Points((device, *_LATENCY, _stopping(run), *_REST)),
        Words("The whole of it is in docs/measurement.md of enginesmith."),
    )


def _stopping(run: Run) -> str:
    measure = run.recipe.measure
    rule = f"Measuring stops when every median is known to ± {measure.precision:.0%}, or after {measure.seconds:g} s"
    stops = {row.stopped_because for record in (run.baseline, *run.variants) for row in record.latency}
    here = ", ".join(sorted(one for one in stops if one))
    return f"{rule} for each batch size{f'; here: {here}' if here else ''}."
