"""Options that commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


model_argument = click.argument("model")


store_option = click.option("--store", metavar="FOLDER|URL", help="The store, perhaps shared; else $ENGINESMITH_STORE.")


output_option = click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write.")


what_to_load = together(
    click.option("--input", "inputs", multiple=True, metavar="NAME:DTYPE:DIMS", help="x:float32:batch,3,224,224"),
    click.option("--shape", "shapes", multiple=True, metavar="DIM=MIN:OPT:MAX", help="batch=1:8:64"),
    click.option("--batch", "batch", metavar="N,N", help="Batch sizes to measure, or sweep; default 1,8."),
    click.option("--eval", "eval_data", metavar="DATA", help="Labelled data: embedded set, .npz, images, texts …"),
    click.option("--labels", metavar="KEY", help="Its key of the labels; default labels, in texts label."),
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


how_to_export = together(
    click.option("--opset", type=int, help="ONNX opset version."),
    click.option("--exporter", type=click.Choice(["auto", "dynamo", "torchscript"]), help="Which exporter."),
    click.option("--attention", type=click.Choice(["fused", "decomposed"]), help="One operator, or several."),
    click.option("--external-data", metavar="SIZE", help="Weights above this size go to a file of their own."),
)


how_to_calibrate = together(
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


how_to_prune = together(
    click.option("--importance", type=click.Choice(["l1", "l2", "taylor", "bn", "random"]), help="Default l2."),
    click.option("--prune-scope", type=click.Choice(["global", "uniform"]), help="Rank all layers together, or each."),
    click.option("--multiple-of", type=int, help="Channels are kept at multiples of this, at most 256; default 16."),
    click.option("--protect", multiple=True, metavar="NAME", help="Module or pattern whose channels stay."),
    click.option("--prune-steps", type=int, help="In so many steps, each of which ranks anew, and recovers."),
    click.option("--no-heads", "heads", flag_value=False, default=None, help="Leave attention heads alone."),
    click.option("--recover", metavar="METHOD", help="Train back: distil, supervised, or module:function."),
    click.option("--recover-time", metavar="TIME", help="Time for it; default 2m."),
    click.option("--recover-memory", metavar="SIZE", help="What it may take; batches are worked through in parts."),
)


with_budgets = together(
    click.option("--max-memory", metavar="SIZE", help="Largest peak memory."),
    click.option("--max-latency", metavar="TIME", help="Largest median latency at the first batch size."),
    click.option("--max-p99", metavar="TIME", help="Largest 99th percentile of latency, there."),
    click.option("--min-throughput", type=float, metavar="N", help="Smallest throughput, samples a second."),
    click.option("--max-size", metavar="SIZE", help="Largest size of the engine's files."),
    click.option("--max-build-time", metavar="TIME", help="Longest time that building the engine takes."),
    click.option("--min-sqnr", type=float, metavar="DB", help="Fidelity threshold."),
)


how_to_build = together(
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
    click.option(
        "--optimization-profile", "profiles", multiple=True, metavar="DIM=MIN:OPT:MAX,…", help="One more of them."
    ),
    click.option("--host-code", is_flag=True, default=None, help="Allow host code in engines."),
)


how_to_run_tensorrt = together(
    click.option("--cuda-graphs", is_flag=True, default=None, help="Replay each set of shapes as a CUDA graph."),
    click.option("--share-activation-memory", is_flag=True, default=None, help="One buffer for all engines."),
    click.option("--weight-streaming-budget", metavar="SIZE", help="Streamed weights kept on the device."),
)


where_to_run = together(
    click.option("--device", metavar="cpu|cuda[:I]", help="Where engines run."),
    click.option("--threads", type=int, help="CPU threads of a session; default: one a core."),
)


how_to_measure = together(
    click.option("--measure-time", metavar="TIME", help="Longest time for one batch size; default 20s."),
    click.option("--precision-target", type=float, metavar="SHARE", help="Stop at medians known to ± this; 0.02."),
    click.option("--concurrency", metavar="N,N", help="Callers at the same time; throughput is measured with each."),
    click.option("--memory-limit", metavar="SIZE", help="What a session may take; what needs more is out of memory."),
    click.option("--no-memory", "memory", flag_value=False, default=None, help="Do not measure peak memory."),
    click.option("--profile", is_flag=True, default=None, help="Time every operator, by the module it comes from."),
    click.option("--limits/--no-limits", default=None, help="Hold times against what the machine can do at best."),
)


how_to_work = together(
    click.option("--jobs", type=click.IntRange(1), help="Steps at the same time; default 2, on one core 1."),
    click.option("--no-cache", is_flag=True, help="Do every step again."),
    click.option("--time-limit", metavar="TIME", help="Stop after this long; what is missing can be resumed."),
    store_option,
    click.option("--executor", type=click.Choice(["local", "ray"]), default="local", help="Where steps run."),
    click.option("--ray-address", metavar="auto|ray://HEAD:10001|HEAD:6379", help="The Ray cluster; default auto."),
    click.option("--quiet", is_flag=True, help="No progress on standard error."),
    as_json_option,
)
