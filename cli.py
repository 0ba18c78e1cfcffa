"""The command line: options in, one call into the pipeline, a rendering out. Nothing heavy is imported up here."""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from enginesmith.pipeline.job import Settings
    from enginesmith.pipeline.recipe import Recipe

_INTERRUPTED = 130


class _Commands(click.Group):
    """Commands whose errors become one clear message and an exit code."""

    def main(self, args: Sequence[str] | None = None, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        try:
            result = super().main(args, **{**kwargs, "standalone_mode": False})
            sys.exit(result if isinstance(result, int) else 0)
        except click.ClickException as error:
            error.show()
            if "--json" in given:
                known = {"error": error.format_message(), "remedy": "", "exit_code": error.exit_code}
                click.echo(json.dumps({**known, "class": "UsageError", "failure": ""}, indent=1))
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt) as interrupt:
            click.echo(f"interrupted{interrupt.__cause__ or interrupt}", err=True)
            sys.exit(_INTERRUPTED)
        except Exception as error:
            from enginesmith.pipeline.errors import EnginesmithError

            if "--debug" in given or not isinstance(error, EnginesmithError):
                raise
            click.echo(f"error: {error}", err=True)
            if "--json" in given:
                known = {"error": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
                kind = {"class": type(error).__name__, "failure": error.failure}
                click.echo(json.dumps({**known, **kind}, indent=1))
            sys.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="enginesmith")
@click.option("--debug", is_flag=True, help="Show the whole trace of an error.")
def main(debug: bool) -> None:
    """Make the fastest inference engine that fits a memory and an accuracy budget, and prove it.

    \b
    enginesmith optimize digits
    enginesmith optimize net.py:build --batch 1,8,64 --max-memory 2GiB
    enginesmith export hf:./my-bert -o bert.onnx
    """
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _shown() -> ModuleType:
    """What renders results; not imported before there is something to render."""
    from enginesmith.pipeline.report import terminal

    return terminal


Command = Callable[..., Any]


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
_model = click.argument("model")
_to = click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write.")
_what_to_load = _options(
    click.option("--input", "inputs", multiple=True, metavar="NAME:DTYPE:DIMS", help="x:float32:batch,3,224,224"),
    click.option("--shape", "shapes", multiple=True, metavar="DIM=MIN:OPT:MAX", help="batch=1:8:64"),
    click.option("--batch", "batch", metavar="N,N", help="Batch sizes to measure, or sweep; default 1,8."),
    click.option("--eval", "eval_data", metavar="DATA", help="Labelled data: embedded set, .npz, images, texts …"),
    click.option("--resize", metavar="N|H,W", help="Images: the shorter side, or height and width."),
    click.option("--crop", metavar="N|H,W", help="Images: the centre that is cut out after that."),
    click.option("--mean", metavar="X,X,X", help="Images: subtracted, after scaling to 0…1."),
    click.option("--std", metavar="X,X,X", help="Images: divided by after that."),
    click.option("--tokenizer", metavar="PATH", help="Texts: tokenizer.json, or a Hugging Face folder."),
    click.option("--text-field", metavar="KEY", help="Texts: the key of the text in each line; default text."),
    click.option("--max-length", type=int, help="Texts: tokens in each row."),
    click.option("--seed", type=int, help="Seed of random weights and samples."),
    click.option("--allow-pickle", is_flag=True, default=None, help="Let the model's code read pickles."),
)
_how_to_export = _options(
    click.option("--opset", type=int, help="ONNX opset version."),
    click.option("--exporter", type=click.Choice(["auto", "dynamo", "torchscript"]), help="Which exporter."),
    click.option("--attention", type=click.Choice(["fused", "decomposed"]), help="One operator, or several."),
    click.option("--external-data", metavar="SIZE", help="Weights above this size go to a file of their own."),
)
_how_to_calibrate = _options(
    click.option("--calibration", metavar="DATA", help="Data for ranges: embedded set, .npz, images, texts …"),
    click.option("--samples", type=int, help="How many samples of it are used; default 128."),
    click.option("--synthetic-calibration", is_flag=True, default=None, help="Make data up, where there is none."),
    click.option("--ranges", type=click.Choice(["auto", "minmax", "percentile", "entropy", "mse"]), help="Method."),
    click.option("--placement", type=click.Choice(["auto", "onnxruntime", "tensorrt"]), help="Rules for Q/DQ pairs."),
    click.option("--percentile", type=float, help="Share of the values that ranges by percentile hold; 99.99."),
    click.option("--weight-bits", type=int, help="Bits of int8 weights: 8, or 7 where 8 would saturate."),
    click.option("--keep", multiple=True, metavar="NAME", help="Group, module or pattern that stays in float."),
    click.option("--smooth", metavar="ALPHA|auto", help="SmoothQuant: move outliers into weights; auto, or 0 to 1."),
    click.option("--smooth-insert", is_flag=True, default=None, help="Also where it costs a multiplication."),
    click.option("--awq", is_flag=True, default=None, help="Activation-aware scaling before int4."),
    click.option("--equalise", is_flag=True, default=None, help="Cross-layer equalisation, for depthwise nets."),
    click.option("--bias-correction", is_flag=True, default=None, help="Take the mean error out of the biases."),
    click.option("--convert-io", is_flag=True, default=None, help="Inputs and outputs in fp16 or bf16 too."),
    click.option("--max-drop", type=float, help="Largest loss of the metric."),
    click.option("--metric", help="top1, top5, mse or module:function."),
    click.option("--eval-samples", type=int, help="How many samples of the labelled data are used."),
    click.option("--search-limit", metavar="TIME", help="Time for choosing what stays in float; default 10m."),
    click.option("--search-steps", type=int, help="Most assignments that are tried; default 12."),
)
_how_to_prune = _options(
    click.option("--importance", type=click.Choice(["l1", "l2", "taylor", "bn", "random"]), help="Default l2."),
    click.option("--prune-scope", type=click.Choice(["global", "uniform"]), help="Rank all layers together, or each."),
    click.option("--multiple-of", type=int, help="Channels are kept at multiples of this; default 8."),
    click.option("--protect", multiple=True, metavar="NAME", help="Module or pattern whose channels stay."),
    click.option("--prune-steps", type=int, help="In so many steps, each of which ranks anew, and recovers."),
    click.option("--no-heads", "heads", flag_value=False, default=None, help="Leave attention heads alone."),
    click.option("--recover", metavar="METHOD", help="Train back: distil, supervised, or module:function."),
    click.option("--recover-time", metavar="TIME", help="Time for it; default 2m."),
    click.option("--recover-memory", metavar="SIZE", help="What it may take; batches are worked through in parts."),
)
_how_to_build = _options(
    click.option("--target", "targets", multiple=True, help="sm86, portable …: TensorRT-RTX builds ahead of time."),
    click.option("--workspace", metavar="SIZE,SIZE", help="Limits, each a variant: 64MiB,256MiB,max; or sweep."),
    click.option("--tactic-dram", metavar="SIZE", help="Device memory that trying one kernel may take."),
    click.option("--tactic-shared-memory", metavar="SIZE", help="Shared memory that a kernel may use."),
    click.option("--optimization-level", type=int, help="0 builds fastest, 5 searches longest."),
    click.option("--aux-streams", type=int, help="Most streams besides the main one."),
    click.option("--tiling", type=click.Choice(["none", "fast", "moderate", "full"]), help="Search for tiled kernels."),
    click.option("--sparse-weights", is_flag=True, default=None, help="Kernels for 2:4 sparse weights."),
    click.option("--weight-streaming", is_flag=True, default=None, help="Weights can be streamed from the host."),
    click.option("--strip-plan", is_flag=True, default=None, help="Leave the weights out, to be refitted."),
    click.option("--refit", is_flag=True, default=None, help="Weights can be replaced in the built engine."),
    click.option("--version-compatible", is_flag=True, default=None, help="Later versions can load the engine."),
    click.option("--hardware-compatibility", help="none, ampere_plus or same_compute_capability."),
    click.option("--tf32/--no-tf32", default=None, help="Whether fp32 products may be rounded to TF32."),
    click.option("--plugins", multiple=True, metavar="FILE.so", help="Plugin library to load; it is code, and is run."),
    click.option("--timing-cache", metavar="FILE", help="Kernel timings; default one per device and version."),
    click.option("--locked", is_flag=True, default=None, help="Fail where a timing is missing."),
    click.option("--profile", "profiles", multiple=True, metavar="DIM=MIN:OPT:MAX,…", help="One more profile."),
    click.option("--host-code", is_flag=True, default=None, help="Allow host code in engines."),
)
_how_to_run_tensorrt = _options(
    click.option("--cuda-graphs", is_flag=True, default=None, help="Replay each set of shapes as a CUDA graph."),
    click.option("--share-activation-memory", is_flag=True, default=None, help="One buffer for all engines."),
    click.option("--weight-streaming-budget", metavar="SIZE", help="Streamed weights kept on the device."),
)
_where_to_run = _options(
    click.option("--device", metavar="cpu|cuda[:I]", help="Where engines run."),
    click.option("--threads", type=int, help="CPU threads of a session; default: one a core."),
)
_how_to_measure = _options(
    click.option("--measure-time", metavar="TIME", help="Longest time for one batch size; default 20s."),
    click.option("--precision-target", type=float, metavar="SHARE", help="Stop at medians known to ± this; 0.02."),
    click.option("--concurrency", metavar="N,N", help="Callers at the same time; throughput is measured with each."),
    click.option("--memory-limit", metavar="SIZE", help="What a session may take; what needs more is out of memory."),
    click.option("--no-memory", "memory", flag_value=False, default=None, help="Do not measure peak memory."),
    click.option("--limits/--no-limits", default=None, help="Hold times against what the machine can do at best."),
)
_how_to_work = _options(
    click.option("--jobs", type=click.IntRange(1), help="Steps at the same time; default 2, on one core 1."),
    click.option("--no-cache", is_flag=True, help="Do every step again."),
    click.option("--time-limit", metavar="TIME", help="Stop after this long; what is missing can be resumed."),
    click.option("--store", type=click.Path(path_type=Path), help="Folder of the store; else $ENGINESMITH_STORE."),
    click.option("--quiet", is_flag=True, help="No progress on standard error."),
    _as_json,
)


@main.command()
@_model
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="Recipe; options change it.")
@click.option("--engine", "engines", multiple=True, help="onnxruntime, compiled, tensorrt_rtx …; may be repeated.")
@click.option("--graph-optimization", multiple=True, help="ONNX Runtime's level: disabled, basic, extended, all.")
@click.option("--no-simplify", is_flag=True, default=None, help="Leave the exported graph as it is.")
@click.option("--precision", "precisions", multiple=True, help="fp32, fp16, bf16, int8, int8+fp16, int8-dynamic …")
@click.option("--prune", multiple=True, metavar="TARGET", help="0.3 of channels go; macs=0.5, latency=0.6 are left.")
@click.option("--prune-sensitivity", is_flag=True, default=None, help="Show what each group of layers costs, alone.")
@click.option("--sparsity", multiple=True, metavar="PATTERN", help="Zeros in weights: 2:4, or unstructured=0.5.")
@click.option("--permute", is_flag=True, default=None, help="2:4: put channels in an order that keeps more weight.")
@click.option("--min-sqnr", type=float, metavar="DB", help="Fidelity threshold.")
@click.option("--max-memory", metavar="SIZE", help="Largest peak memory.")
@click.option("--max-latency", metavar="TIME", help="Largest median latency at the first batch size.")
@click.option("--objective", type=click.Choice(["latency", "throughput", "memory", "size"]), help="What wins.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory; default runs/MODEL-TIME.")
@_what_to_load
@_how_to_export
@_how_to_calibrate
@_how_to_prune
@_how_to_build
@_how_to_run_tensorrt
@_where_to_run
@_how_to_measure
@_how_to_work
def optimize(model: str, recipe_file: Path | None, out: Path | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Make every variant of MODEL, prove them right, measure them, and name the winner.

    Example: enginesmith optimize net.py:build --precision fp32 --precision int8 --calibration data.npz --max-drop 0.01
    """
    from enginesmith.pipeline import job

    recipe = _recipe(model, recipe_file, options)
    folder = out or job.default_out(recipe)
    with _settings(options, quiet) as settings, _resumable(folder):
        run = job.optimize(recipe, folder, settings)
    code: int = _shown().show_run(run, folder, as_json)
    return code


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@_how_to_work
def resume(run: Path, as_json: bool, quiet: bool, **options: Any) -> int:
    """Do what is still missing in the run directory RUN.

    Example: enginesmith resume runs/net
    """
    from enginesmith.pipeline import job

    with _settings(options, quiet) as settings, _resumable(run):
        result = job.resume(run, settings)
    code: int = _shown().show_run(result, run, as_json)
    return code


@main.command()
@_model
@_to
@_what_to_load
@_how_to_export
@_how_to_work
def export(model: str, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Export MODEL to ONNX and hold the graph against eager.

    Example: enginesmith export net.py:build -o net.onnx --input image:float32:batch,3,224,224
    """
    from enginesmith.pipeline import stages

    with _settings(options, quiet) as settings:
        result = stages.export(_recipe(model, None, options), output, settings)
    _shown().show_stage(result, as_json)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@_to
@_what_to_load
@_how_to_work
def simplify(file: Path, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Clean the graph of an ONNX FILE and hold the result against it.

    Example: enginesmith simplify net.onnx -o net-clean.onnx
    """
    from enginesmith.pipeline import stages

    with _settings(options, quiet) as settings:
        result = stages.simplify(_recipe(str(file), None, options), output, settings)
    _shown().show_stage(result, as_json)


@main.command()
@_model
@_to
@click.option("--precision", "precisions", multiple=True, required=True, help="fp16, bf16, int8, int8+fp16 …")
@click.option("--engine", "engines", multiple=True, help="Made for this engine; without it, for all of them.")
@click.option("--min-sqnr", type=float, metavar="DB", help="Fidelity threshold.")
@_what_to_load
@_how_to_export
@_how_to_calibrate
@_where_to_run
@_how_to_work
def precision(model: str, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Turn MODEL, or an ONNX file, into an ONNX graph of another precision, calibrated and held against it.

    Example: enginesmith precision net.onnx -o net-int8.onnx --precision int8 --calibration data.npz
    """
    from enginesmith.pipeline import stages

    if not options["engines"] and not options["placement"]:
        options["placement"] = "tensorrt"  # the strictest rules: what they make runs in every engine
    with _settings(options, quiet) as settings:
        result = stages.precision(_recipe(model, None, options), output, settings)
    _shown().show_stage(result, as_json)


@main.command()
@_model
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write; it is a MODEL.")
@click.option("--prune", required=True, metavar="TARGET", help="0.3, macs=0.5, params=0.5, latency=0.6.")
@click.option("--engine", "engines", multiple=True, help="What latency=… is measured on; default onnxruntime.")
@click.option("--data", "calibration", metavar="DATA", help="For taylor and recovery: embedded set, .npz, images …")
@click.option("--samples", type=int, help="How many samples of it taylor uses; default 128.")
@_how_to_prune
@_what_to_load
@_how_to_work
def prune(model: str, output: Path, prune: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Take channels, hidden units and attention heads out of MODEL; the result is a smaller model.

    Example: enginesmith prune net.py:build -o pruned --prune macs=0.5 --recover distil --data data.npz
    """
    from enginesmith.pipeline import stages

    options["prune"] = (prune,)
    with _settings(options, quiet) as settings:
        result = stages.prune(_recipe(model, None, options), output, settings)
    _shown().show_pruned(result, as_json)


@main.command()
@_model
@_to
@click.option("--sparsity", default="2:4", show_default=True, metavar="PATTERN", help="2:4, or unstructured=0.5.")
@click.option("--permute", is_flag=True, help="2:4: put channels in an order that keeps more of the weights.")
@click.option("--per-layer", is_flag=True, help="Unstructured: a threshold for each layer, not one for all.")
@click.option("--protect", multiple=True, metavar="NAME", help="Weight, node, module or pattern that stays dense.")
@click.option("--min-sqnr", type=float, metavar="DB", help="Fail if the outputs are farther from the dense ones.")
@_what_to_load
@_how_to_export
@_how_to_work
def sparsify(
    model: str,
    output: Path,
    sparsity: str,
    permute: bool,
    per_layer: bool,
    protect: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Set weights of MODEL, or of an ONNX file, to zero: 2:4 for sparse tensor cores, or the smallest ones.

    One shot, without training; how far the answers are from the dense model's is shown.

    Example: enginesmith sparsify net.onnx -o net-24.onnx --sparsity 2:4 --permute
    """
    from enginesmith.pipeline import stages
    from enginesmith.pipeline.sparsity.options import SparsifyOptions

    chosen = SparsifyOptions(scope="layer" if per_layer else "global", permute=permute, protect=protect)
    with _settings(options, quiet) as settings:
        result = stages.sparsify(_recipe(model, None, options), sparsity, chosen, output, settings)
    _shown().show_stage(result, as_json)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--against", "model", required=True, metavar="MODEL", help="What the outputs have to equal.")
@click.option("--min-sqnr", type=float, metavar="DB", help="Fidelity threshold.")
@_what_to_load
@_where_to_run
@_how_to_work
def verify(file: Path, model: str, as_json: bool, quiet: bool, **options: Any) -> int:
    """Compare the outputs of an ONNX FILE with those of a model, at the smallest, usual and largest shape.

    Example: enginesmith verify net.onnx --against net.py:build
    """
    from enginesmith.pipeline import stages

    with _settings(options, quiet) as settings:
        result = stages.verify(_recipe(model, None, options), file, settings)
    _shown().show_stage(result, as_json)
    return 0 if result.passed else 1


@main.command()
@click.argument("models", nargs=-1, required=True)
@_what_to_load
@_where_to_run
@_how_to_measure
@click.option("--profile", is_flag=True, default=None, help="Time every operator, by the module it comes from.")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="Recipe; options change it.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(["eager", "compiled"]),
    help="Measure the baseline's module by this engine too.",
)
@click.option("--precision", "precisions", multiple=True, help="fp32, fp16 or bf16: what those engines cast it to.")
@_how_to_work
def benchmark(models: tuple[str, ...], recipe_file: Path | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Measure latency and peak memory of MODELS side by side, interleaved.

    The first PyTorch model is the baseline, which runs as it is; without one, the first ONNX file.

    With --engine, that PyTorch model is measured in other ways too: --engine eager --engine compiled --precision fp16

    Example: enginesmith benchmark net.py:build net.onnx net.engine --batch 1,8,32
    """
    from enginesmith.pipeline import stages

    options["limits"] = options["limits"] is not False
    with _settings(options, quiet) as settings:
        run = stages.benchmark(_recipe(models[0], recipe_file, options), models, settings)
    code: int = _shown().show_run(run, None, as_json)
    measured = any(record.status == "measured" for record in (run.baseline, *run.variants))
    return code or (0 if measured else 1)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Engine file to write.")
@click.option("--refit-engine", metavar="ENGINE", help="Put FILE's weights into this engine instead of building one.")
@click.option("--check", is_flag=True, help="Only say for which targets it builds; nothing is written.")
@click.option("--engine", "engines", multiple=True, default=("tensorrt_rtx",), show_default=True, help="Which engine.")
@_what_to_load
@_how_to_build
@_where_to_run
@_how_to_work
def build(
    file: Path,
    output: Path | None,
    refit_engine: str | None,
    check: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Build a TensorRT engine from an ONNX FILE, as it is, and audit it; or say whether it builds.

    Example: enginesmith build net.onnx -o net.engine --target sm86 --shape batch=1:8:64
    """
    from enginesmith.pipeline import build_stages

    if check == (output is not None) or (check and refit_engine):
        raise click.UsageError("give either -o FILE.engine, perhaps with --refit-engine, or --check")
    recipe = _recipe(str(file), None, options)
    with _settings(options, quiet) as settings:
        if output is not None:
            built = build_stages.build(recipe, output, settings, refit_engine)
            _shown().print_json(built.model_dump(mode="json")) if as_json else click.echo(built.summary)
            return 0
        found = build_stages.check(recipe, settings)
    _shown().show_table([_checked_row(one.model_dump(mode="json"), as_json) for one in found], as_json)
    enough = all if recipe.targets else any  # without a target: whether it builds for any at all
    return 0 if enough(one.builds for one in found) else 1


def _checked_row(row: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """A row of ``build --check`` as people read it; machines get it as it is."""
    if as_json:
        return row
    return {"target": row["target"], "builds": "yes" if row["builds"] else "no"} | {
        name: row[name] for name in ("failure", "reason", "remedy")
    }


@main.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--memory", metavar="SIZE", help="Device memory that all models together may take.")
@click.option(
    "--keep-speed", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="Share that is enough."
)
@click.option("--engine", "engines", multiple=True, default=("tensorrt_rtx",), show_default=True, help="Which engine.")
@_what_to_load
@_how_to_build
@_how_to_run_tensorrt
@_where_to_run
@_how_to_work
def fit(
    models: tuple[str, ...], memory: str | None, keep_speed: float, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Find the largest batch of MODELS that fits a memory budget, without running them.

    TensorRT's builder tells what its engines take. For --engine onnxruntime it is predicted from the graph.

    With a run directory that has measured a workspace sweep: the smallest workspace that keeps the speed.

    Example: enginesmith fit net.onnx --memory 8GiB --target sm86
    """
    from enginesmith.pipeline import fitting, run
    from enginesmith.pipeline.units import parse_bytes

    if len(models) == 1 and Path(models[0]).is_dir():
        kept = fitting.keeping(run.read(Path(models[0])), keep_speed)
        _shown().show_table([one.model_dump(mode="json") for one in kept], as_json)
        return 0
    if memory is None:
        raise click.UsageError("give --memory SIZE, or a run directory")

    with _settings(options, quiet) as settings:
        found = fitting.fit(_recipe(models[0], None, options), models, parse_bytes(memory), settings)
    _shown().show_facts(found.model_dump(mode="json"), as_json)
    return 0 if found.largest_batch is not None else 3


@main.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@_as_json
def inspect_file(file: Path, as_json: bool) -> None:
    """Show what is inside an ONNX model, a torch.export archive, a data set or a run directory.

    Example: enginesmith inspect net.onnx
    """
    from enginesmith.pipeline import inspection

    _shown().show_facts(inspection.inspect(file), as_json)


@main.command()
@_model
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; otherwise standard output.")
def init(model: str, output: Path | None) -> None:
    """Write a commented recipe for MODEL to start from.

    Example: enginesmith init net.py:build -o recipe.yaml
    """
    from enginesmith.pipeline import recipe
    from enginesmith.pipeline.errors import UsageError
    from enginesmith.pipeline.source import resolve
    from enginesmith.pipeline.store import storage_errors

    resolve(model)
    text = recipe.commented(recipe.make({"model": model}))
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists():
        raise UsageError(f"{output} exists", "choose another name, or remove it first")
    with storage_errors(str(output)):
        output.write_text(text)
    click.echo(f"wrote {output}; run it with: enginesmith optimize {model} --recipe {output}", err=True)


@main.command()
@_as_json
def doctor(as_json: bool) -> None:
    """Say what this machine can do, what is missing, and how to get it.

    Example: enginesmith doctor
    """
    from enginesmith.pipeline import doctor as doctors

    found = doctors.examine()
    _shown().show_facts(found.model_dump(mode="json") if as_json else doctors.readable(found), as_json)


@main.command()
@_as_json
def models(as_json: bool) -> None:
    """List the zoo: parameters, FLOPs of one sample and inputs.

    Example: enginesmith models
    """
    from enginesmith.pipeline import inspection

    _shown().show_table(inspection.zoo(), as_json)


@main.command()
@click.option("--device", default="cpu", show_default=True, help="Device to look at.")
@_as_json
def engines(device: str, as_json: bool) -> None:
    """List the engines: which can be used here, and why not.

    Example: enginesmith engines --device cuda
    """
    from enginesmith.pipeline import inspection

    _shown().show_table(inspection.engines(device), as_json)


@main.group()
def cache() -> None:
    """Look after the store of finished steps."""


_store = click.option("--store", type=click.Path(path_type=Path), help="Folder of the store.")


@cache.command("list")
@_store
@_as_json
def cache_list(store: Path | None, as_json: bool) -> None:
    """List what is kept, the latest used first.

    Example: enginesmith cache list
    """
    from enginesmith.pipeline import inspection

    _shown().show_table(inspection.cached(store), as_json)


@cache.command("verify")
@_store
@_as_json
def cache_verify(store: Path | None, as_json: bool) -> None:
    """Read everything and remove what is damaged; it is made again when it is needed.

    Example: enginesmith cache verify
    """
    from enginesmith.pipeline.store import Store, default_root

    damaged = Store(store or default_root()).verify()
    _shown().show_facts({"damaged": len(damaged), "removed": damaged}, as_json)


@cache.command("prune")
@click.option("--max-size", metavar="SIZE", help="Keep the latest used up to this size.")
@click.option("--max-age", metavar="TIME", help="Remove what was not used for so long: 30d.")
@_store
@_as_json
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
    _shown().show_facts({"removed": len(removed), "freed_bytes": sum(entry.bytes for entry in removed)}, as_json)


@contextlib.contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say on Ctrl-C how to go on, if there is something to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        hint = f"; `enginesmith resume {folder}` goes on from here" if (folder / "run.json").exists() else ""
        raise KeyboardInterrupt(hint) from None


@contextlib.contextmanager
def _settings(options: dict[str, Any], quiet: bool) -> "Iterator[Settings]":
    from enginesmith.pipeline.job import Settings
    from enginesmith.pipeline.report import live
    from enginesmith.pipeline.units import parse_seconds

    limit = options["time_limit"]
    with live.watching(quiet) as listener:
        yield Settings(
            store=options["store"],
            reuse=not options["no_cache"],
            jobs=options["jobs"] or Settings().jobs,
            time_limit_seconds=parse_seconds(limit) if limit else None,
            listener=listener,
        )


_PLACES = {
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
    **{
        name: ("tensorrt", name)
        for name in ("tactic_dram", "tactic_shared_memory", "optimization_level", "aux_streams", "tiling")
        + ("sparse_weights", "weight_streaming", "strip_plan", "refit", "version_compatible", "hardware_compatibility")
        + ("tf32", "plugins", "timing_cache", "locked", "profiles", "host_code")
    },
    **{name: ("pruning", name) for name in ("importance", "multiple_of", "protect", "heads")},
    "prune_scope": ("pruning", "scope"),
    "prune_steps": ("pruning", "steps"),
    "recover_time": ("recovery", "seconds"),
    "recover_memory": ("recovery", "memory_bytes"),
    "permute": ("sparsifying", "permute"),
    **{name: ("data_options", name) for name in ("tokenizer", "text_field", "max_length")},
    **{name: ("tensorrt_run", name) for name in ("cuda_graphs", "share_activation_memory", "weight_streaming_budget")},
    **{
        name: (name,)
        for name in ("inputs", "targets", "engines", "graph_optimization", "device", "threads", "eval_data", "metric")
        + ("precisions", "calibration", "samples", "synthetic_calibration", "eval_samples", "objective", "seed")
        + ("allow_pickle", "prune", "prune_sensitivity", "sparsity")
    },
}
"""Option → where its value goes in the recipe."""


def _recipe(model: str, file: Path | None, options: dict[str, Any]) -> "Recipe":
    """The recipe file, if any, changed by the options that were given."""
    from enginesmith.pipeline import recipe

    values = recipe.read(file) if file else {}
    values["model"] = model
    for name, (*parts, last) in _PLACES.items():
        value = options.get(name)
        if value is None or value == ():
            continue
        place = values
        for part in parts:
            inner = place.get(part) or {}
            place[part] = dict(inner) if isinstance(inner, dict) else {}
            place = place[part]
        place[last] = list(value) if isinstance(value, tuple) else value
    for name in ("resize", "crop", "mean", "std"):
        if options.get(name):
            values.setdefault("data_options", {})[name] = _sizes(name, options[name])
    if options.get("recover"):
        values["recover"] = True
        values["recovery"] = {**(values.get("recovery") or {}), "method": options["recover"]}
    if options.get("no_simplify"):
        values["simplify"] = False
    if options.get("workspace"):
        values["workspace"] = [part.strip() for part in options["workspace"].split(",")]
    if options.get("batch") == "sweep":
        values["batch"] = [1]
        values["measure"] = {**(values.get("measure") or {}), "sweep": True}
    elif options.get("batch"):
        values["batch"] = _numbers("batch", options["batch"])
    if options.get("concurrency"):
        values["measure"] = {
            **(values.get("measure") or {}),
            "concurrency": _numbers("concurrency", options["concurrency"]),
        }
    if options.get("shapes"):
        values["shapes"] = {**(values.get("shapes") or {}), **dict(_pair(text) for text in options["shapes"])}
    return recipe.make(values)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is no list of numbers like 1,8,64", param_hint=f"--{option}")
    return [int(part) for part in parts]


def _sizes(option: str, text: str) -> float | list[float]:
    """``224`` as a number, ``0.5,0.5`` as several."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no number or list of numbers", param_hint=f"--{option}") from error
    whole = [int(number) if number.is_integer() and option in ("resize", "crop") else number for number in numbers]
    return whole[0] if len(whole) == 1 and option in ("resize", "crop") else whole


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not of the form batch=1:8:64", param_hint="--shape")
    return name, value


if __name__ == "__main__":
    main()
