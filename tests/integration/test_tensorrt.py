"""TensorRT-RTX through the command line, on a machine without a GPU: it builds there, and what is left is said."""

import json
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith import load_run
from enginesmith.pipeline.artifact import file_digest
from enginesmith.pipeline.engines.tensorrt import builder, manifest, versions
from enginesmith.pipeline.engines.tensorrt.builder import BuilderSettings, Built, Profile
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.frameworks.onnx import model_file

pytestmark = pytest.mark.skipif(
    versions.installed_version("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed: pip install tensorrt-rtx"
)
T = TensorProto
RTX = versions.capabilities("tensorrt_rtx")
RANGE = ("--shape", "batch=1:8:64")
SM86 = ("--target", "sm86")


def tensor(name: str, *shape: int, dtype: str = "float32", seed: int = 0) -> onnx.TensorProto:
    values = np.random.default_rng(seed).standard_normal(shape)
    return numpy_helper.from_array((values * 0.1).astype(dtype), name)


def node(operator: str, inputs: str, outputs: str, module: str = "", domain: str = "", **attributes: Any) -> Any:
    made = helper.make_node(
        operator, inputs.split(), outputs.split(), name=outputs.split()[0] + "_op", domain=domain, **attributes
    )
    if module:
        made.metadata_props.add(key=model_file.MODULE_KEY, value=module)
    return made


Dims = tuple[int | str, ...]


def model(
    *nodes: onnx.NodeProto,
    x: Dims = ("batch", 64),
    y: Dims = ("batch", 64),
    weights: tuple[onnx.TensorProto, ...] = (),
    kind: int = T.FLOAT,
    opset: int = 21,
    domain: str = "",
) -> onnx.ModelProto:
    ends = [[helper.make_tensor_value_info(name, kind, shape)] for name, shape in (("x", x), ("y", y))]
    graph = helper.make_graph(list(nodes), "g", *ends, list(weights))
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


MLP = model(
    node("MatMul", "x w", "h", "encoder.first"),
    node("Relu", "h", "r"),
    node("MatMul", "r v", "y", "encoder.second"),
    weights=(tensor("w", 64, 64), tensor("v", 64, 64, seed=1)),
)
CONVNET = model(
    node("Conv", "x w", "h", pads=[1] * 4),
    node("Relu", "h", "r"),
    node("Conv", "r v", "y", pads=[1] * 4),
    x=("batch", 8, 32, 32),
    y=("batch", 8, 32, 32),
    weights=(tensor("w", 16, 8, 3, 3, dtype="float16"), tensor("v", 8, 16, 3, 3, dtype="float16", seed=1)),
    kind=T.FLOAT16,
)
SCALE = numpy_helper.from_array(np.float32(0.1), "s")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with both nets in it."""
    monkeypatch.chdir(tmp_path)
    onnx.save(MLP, "mlp.onnx")
    onnx.save(CONVNET, "conv.onnx")
    return tmp_path


def parsed(answer: Any) -> Any:
    assert answer.code in (0, 1), answer.text
    return json.loads(answer.stdout)


def test_build_writes_engine_manifest_and_log(cli, here: Path) -> None:
    answer = cli("build", "mlp.onnx", "-o", "out/m.engine", *SM86, *RANGE)
    assert answer.code == 0, answer.text
    assert sorted(path.name for path in (here / "out").iterdir()) == ["m.engine", "m.engine.json", "m.engine.log"]
    engine = here / "out" / "m.engine"
    record = manifest.read(engine)
    assert record.sha256 == file_digest(engine)
    assert (record.engine, record.target, record.compute_capabilities) == ("tensorrt_rtx", "sm86", ("sm86",))
    assert record.version == versions.installed_version("tensorrt_rtx")
    assert record.profiles == ({"x": ((1, 64), (8, 64), (64, 64))},)
    assert [str(spec) for spec in record.signature.inputs] == ["x:float32:batch,64"]
    assert record.workspace_asked_bytes is None
    assert record.workspace_limit_bytes > 0
    assert record.figures.weights_bytes == manifest.read_header(engine).weights_bytes
    assert record.figures.activation_bytes
    assert record.audit.products == record.audit.requested == {"fp32": 2}
    assert record.audit.problems == ()
    log = engine.with_name("m.engine.log").read_text()
    assert f"Total Activation Memory: {record.figures.activation_bytes} bytes" in log
    assert "for sm86" in answer.stdout


def test_build_as_json_is_one_document(cli, here: Path) -> None:
    found = parsed(cli("build", "mlp.onnx", "-o", "m.engine", *SM86, *RANGE, "--json", "--quiet"))
    assert found["files"] == ["m.engine", "m.engine.json", "m.engine.log"]
    assert found["manifest"] == json.loads((here / "m.engine.json").read_text())


def test_more_profiles_come_before_the_whole_range(cli, here: Path) -> None:
    options = (*SM86, *RANGE, "--optimization-profile", "batch=1:1:1", "--json", "--quiet")
    found = parsed(cli("build", "mlp.onnx", "-o", "m.engine", *options))
    assert [profile["x"][2] for profile in found["manifest"]["profiles"]] == [[1, 64], [64, 64]]


def test_check_says_for_each_target_whether_it_builds(cli, here: Path) -> None:
    answer = cli("build", "mlp.onnx", "--check", *RANGE, "--json", "--quiet")
    assert answer.code == 0
    assert cli("build", "mlp.onnx", "--check", "--target", "sm75", *RANGE, "--quiet").code == 1
    rows = {row["target"]: row for row in parsed(answer)}
    assert {name: row["builds"] for name, row in rows.items()} == {name: name != "sm75" for name in RTX.targets}
    assert rows["sm75"]["failure"] == "unsupported"
    assert "MatMul 'h_op' (of the module 'encoder.first')" in rows["sm75"]["reason"]
    assert rows["sm75"]["remedy"] == "use another precision for it, or another target"
    assert [path.name for path in here.iterdir() if path.suffix not in (".onnx", "")] == []


def test_check_as_a_table(cli, here: Path) -> None:
    answer = cli("build", "conv.onnx", "--check", *SM86, "--target", "sm75", *RANGE, "--quiet")
    assert answer.code == 0, answer.text
    rows = [line.split() for line in answer.stdout.splitlines() if line.split()[:1] in (["sm86"], ["sm75"])]
    assert sorted(row[:2] for row in rows) == [["sm75", "yes"], ["sm86", "yes"]]


WHOLE: Profile = {"x": ((1, 64), (8, 64), (64, 64))}
SINGLE: Profile = {"x": ((1, 64), (1, 64), (1, 64))}


def in_process(folder: Path, *profiles: Profile, **options: Any) -> tuple[bytes, Built]:
    """The engine of the MLP, built in this process."""
    onnx.save(MLP, folder / "direct.onnx")
    order = BuilderSettings("tensorrt_rtx", RTX, BuildOptions(**options), None, ("sm86",), profiles or (WHOLE,))
    built = builder.build(order, folder / "direct.onnx", folder / "direct.engine", lambda text: None)
    return (folder / "direct.engine").read_bytes(), built


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The engine of the MLP without any options."""
    return in_process(tmp_path_factory.mktemp("plain"))[0]


def test_profiles_reach_the_engine_in_their_order(tmp_path: Path) -> None:
    layers = in_process(tmp_path, SINGLE, WHOLE)[1].log.layers
    assert layers.index("MaxShape: [1,64]") < layers.index("MaxShape: [64,64]")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "option",
    [
        {"sparse_weights": True},
        {"optimization_level": 0},
        {"optimization_level": 5},
        {"aux_streams": 2},
        {"tiling": "full"},
        {"tactic_dram": 1 << 28},
        {"hardware_compatibility": "ampere_plus"},
    ],
    ids=str,
)
def test_options_said_to_have_no_effect_have_none(option: dict[str, Any], plain: bytes, tmp_path: Path) -> None:
    assert set(option) <= set(RTX.no_effect)
    assert in_process(tmp_path, **option)[0] == plain


@pytest.mark.thorough
@pytest.mark.parametrize(
    "option", [{"tf32": False}, {"weight_streaming": True}, {"tactic_shared_memory": 48 << 10}], ids=str
)
def test_options_that_are_said_to_have_an_effect_have_one(option: dict[str, Any], plain: bytes, tmp_path: Path) -> None:
    assert not set(option) & {*RTX.no_effect, *RTX.refused}
    assert in_process(tmp_path, **option)[0] != plain


HEADS: Dims = ("batch", 4, 16, 32)


def attention(inputs: str) -> onnx.ModelProto:
    parts = [node("Mul", f"x {name}w", name) for name in "qk"]
    weights = (tensor("qw", 32), tensor("kw", 32, seed=1))
    made = model(*parts, node("Attention", inputs, "y"), x=HEADS, y=HEADS, weights=weights, opset=23)
    made.ir_version = 11
    return made


def test_fp32_attention_is_built_from_its_parts(cli, here: Path) -> None:
    onnx.save(attention("q k x"), "m.onnx")
    answer = cli("build", "m.onnx", "-o", "m.engine", *SM86, *RANGE)
    assert answer.code == 0, answer.text


class Case(NamedTuple):
    name: str
    given: onnx.ModelProto
    command: str
    """After ``build m.onnx -o m.engine``."""
    code: int
    words: str
    """What the message has to say, separated by bars."""


def rounded(zero_point: np.generic) -> onnx.ModelProto:
    pair = node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")
    return model(*pair, weights=(SCALE, numpy_helper.from_array(zero_point, "z")))


T86 = "--target sm86 --shape batch=1:8:64"
WITH_SCALE = {"weights": (SCALE,)}
CASES = (
    Case("no target", MLP, "--shape batch=1:8:64", 2, "needs a target|--target|sm86|portable"),
    Case("unknown target", MLP, "--target sm99 --shape batch=1:8:64", 2, "'sm99'|sm86"),
    Case("two targets", MLP, "--target sm86 --target sm89", 2, "2 engines|one target"),
    Case("two limits", MLP, "--target sm86 --workspace 1MiB,max", 2, "2 engines|one workspace limit"),
    Case("strip plan", MLP, f"{T86} --strip-plan", 4, "--strip-plan|a machine with a GPU"),
    Case("enterprise", MLP, "--engine tensorrt", 4, "tensorrt|not installed|pip install"),
    Case("engine without a file", MLP, "--engine onnxruntime", 2, "onnxruntime|tensorrt_rtx"),
    Case("min above max", MLP, "--target sm86 --shape batch=8:4:1", 2, "8:4:1|min <= opt <= max"),
    Case("profile beyond", MLP, f"{T86} --optimization-profile batch=1:1:65", 2, "batch=1:1:65|1:8:64|--shape"),
    Case("profile of another", MLP, f"{T86} --optimization-profile seq=1:1:1", 2, "'seq'|batch"),
    Case("no range", model(node("Relu", "x", "y"), x=("batch", "seq"), y=("batch", "seq")), T86, 2, "'seq'|--shape"),
    Case("limit of nothing", MLP, f"{T86} --workspace 0", 2, "workspace|at least 1 byte"),
    Case("limit too small", MLP, f"{T86} --workspace 4KiB", 1, "a workspace of 4 KiB|--workspace sweep"),
    Case("missing plugin library", MLP, f"{T86} --plugins gone.so", 2, "gone.so|not there"),
    Case(
        "unknown operator",
        model(node("Wobble", "x", "y", "encoder.act", domain="acme"), domain="acme"),
        T86,
        1,
        "Wobble 'y_op'|of the module 'encoder.act'|--plugins",
    ),
    Case(
        "unsupported operator",
        model(node("Det", "x", "y", "head.det"), x=("batch", 3, 3), y=("batch",)),
        T86,
        1,
        "Det 'y_op'|of the module 'head.det'|does not have this operator",
    ),
    Case(
        "int32 bias",
        model(
            node("DequantizeLinear", "b s", "d"),
            node("Add", "x d", "y"),
            weights=(SCALE, numpy_helper.from_array(np.ones(64, np.int32), "b")),
        ),
        T86,
        1,
        "DequantizeLinear 'd_op'|int32|biases in float",
    ),
    Case("uint8 quantization", rounded(np.uint8(128)), T86, 1, "QuantizeLinear 'q_op'|uint8|zero point 0"),
    Case("asymmetric", rounded(np.int8(3)), T86, 1, "QuantizeLinear 'q_op'|zero point is not 0|symmetrically"),
    Case("float64", model(node("Relu", "x", "y"), kind=T.DOUBLE), T86, 1, "'x' is float64|cast"),
    Case(
        "fp8 for a device without it",
        model(
            node("QuantizeLinear", "x s", "q", output_dtype=T.FLOAT8E4M3FN),
            node("DequantizeLinear", "q s", "y"),
            **WITH_SCALE,
        ),
        T86,
        1,
        "float8e4m3fn|sm89 or later|sm86",
    ),
    Case(
        "NaN weights",
        model(node("Mul", "x w", "y"), weights=(numpy_helper.from_array(np.full(64, np.nan, np.float32), "w"),)),
        T86,
        1,
        "'w'|NaN",
    ),
    Case("opset too new", model(node("Relu", "x", "y"), opset=99), T86, 1, "opset 99|knows up to"),
    Case(
        "crash of the parser",
        model(
            node("DepthToSpace", "x", "y", domain="acme", blocksize=0),
            x=("batch", 4, 2, 2),
            y=("batch", "a", "b", "c"),
            domain="acme",
        ),
        T86,
        1,
        "crashed (SIGFPE)",
    ),
)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_bad_builds_end_in_one_message_and_write_nothing(case: Case, cli, here: Path) -> None:
    if "--engine tensorrt" in case.command and versions.installed_version("tensorrt"):
        pytest.skip("tensorrt is installed")
    onnx.save(case.given, "m.onnx")
    before = set(here.iterdir())
    answer = cli("build", "m.onnx", "-o", "m.engine", *case.command.split(), "--quiet")
    assert answer.code == case.code, answer.text
    missing = [word for word in case.words.split("|") if word not in answer.stderr]
    assert not missing, answer.text
    assert "Traceback" not in answer.text
    assert set(here.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("build m.onnx", "either -o FILE.engine"),
        ("build m.onnx --check -o m.engine", "either -o FILE.engine"),
        ("build m.onnx -o m.plan --target sm86", "no .engine file"),
        ("build digits -o m.engine --target sm86", "not an ONNX file"),
        ("build gone.onnx -o m.engine --target sm86", "gone.onnx"),
        ("optimize m.onnx --engine onnxruntime --target sm86", "--target has no effect on onnxruntime"),
        ("optimize m.onnx --engine onnxruntime --workspace sweep", "--workspace has no effect"),
        ("optimize m.onnx --engine onnxruntime --sparse-weights", "--sparse-weights has no effect"),
        ("fit fixed.onnx --memory 1GiB --target sm86", "no dynamic batch"),
        ("fit m.onnx --memory 1GiB --target sm86 --target sm89", "2 targets"),
        ("fit m.onnx --memory lots --target sm86", "lots"),
    ],
)
def test_commands_that_make_no_sense(command: str, words: str, cli, here: Path) -> None:
    onnx.save(MLP, "m.onnx")
    onnx.save(model(node("Relu", "x", "y"), x=(2, 4), y=(2, 4)), "fixed.onnx")
    answer = cli(*command.split())
    assert answer.code == 2, answer.text
    assert words in answer.stderr, answer.text
    assert not (here / "m.engine").exists()


def test_external_data_that_is_missing(cli, here: Path) -> None:
    split = onnx.load("mlp.onnx")
    onnx.save(split, "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert cli("build", "m.onnx", "-o", "one.engine", *SM86, *RANGE).code == 0
    (here / "w.bin").unlink()
    answer = cli("build", "m.onnx", "-o", "two.engine", *SM86, *RANGE)
    assert answer.code == 1, answer.text
    assert "'w.bin'" in answer.stderr
    assert not (here / "two.engine").exists()


@pytest.mark.parametrize("command", ["verify m.engine --against mlp.onnx", "inspect m.engine"])
def test_a_damaged_engine_is_not_opened(command: str, cli, here: Path) -> None:
    assert cli("build", "mlp.onnx", "-o", "m.engine", *SM86, *RANGE, "--quiet").code == 0
    engine = here / "m.engine"
    engine.write_bytes(engine.read_bytes()[:-7])
    answer = cli(*command.split())
    assert answer.code == 1, answer.text
    assert "truncated, or another engine" in answer.stderr, answer.text


def without_a_device() -> bool:
    from enginesmith.pipeline.system.nvidia import cuda_device

    return cuda_device(0) is None


no_device = pytest.mark.skipif(not without_a_device(), reason="there is a CUDA device: tests/gpu runs engines")


@no_device
def test_an_engine_is_not_run_without_a_device(cli, here: Path) -> None:
    assert cli("build", "mlp.onnx", "-o", "m.engine", *SM86, *RANGE, "--quiet").code == 0
    answer = cli("verify", "m.engine", "--against", "mlp.onnx")
    assert answer.code == 4, answer.text
    assert "no CUDA device here" in answer.stderr


def test_inspect_shows_an_engine(cli, here: Path) -> None:
    assert cli("build", "mlp.onnx", "-o", "m.engine", *SM86, *RANGE, "--quiet").code == 0
    found = parsed(cli("inspect", "m.engine", "--json"))
    assert (found["compute_capabilities"], found["sha256"]) == (["sm86"], file_digest(here / "m.engine"))


@pytest.mark.thorough
def test_a_long_chain_of_nodes_does_not_overflow_the_stack(here: Path) -> None:
    """700 nodes overflow a stack of 1 MiB as 4000 do one of the usual 8 MiB, and take a tenth of the time to build."""
    nodes = [node("Sin" if index % 2 else "Cos", f"v{index}", f"v{index + 1}") for index in range(1, 699)]
    onnx.save(model(node("Cos", "x", "v1"), *nodes, node("Sin", "v699", "y")), "m.onnx")

    def limit_stack() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    command = [sys.executable, "-m", "enginesmith.cli", "build", "m.onnx", "-o", "m.engine", *SM86, *RANGE, "--quiet"]
    answer = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit_stack)
    assert answer.returncode == 0, answer.stderr
    assert (here / "m.engine").stat().st_size > 0


@pytest.mark.thorough
def test_two_builds_give_the_same_bytes(cli, here: Path) -> None:
    for name in ("one", "two"):
        answer = cli("build", "conv.onnx", "-o", f"{name}.engine", *SM86, *RANGE, "--no-cache", "--quiet")
        assert answer.code == 0, answer.text
    for suffix in (".engine", ".engine.json", ".engine.log"):
        assert (here / f"one{suffix}").read_bytes() == (here / f"two{suffix}").read_bytes(), suffix


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_fit_finds_the_largest_batch_and_the_smallest_workspace(cli, here: Path) -> None:
    command = ("fit", "conv.onnx", *SM86, "--json", "--quiet")
    probe = parsed(cli("build", "conv.onnx", "-o", "p.engine", *SM86, "--shape", "batch=1:50:50", "--json", "--quiet"))
    figures = probe["manifest"]["figures"]
    io = 2 * 50 * 8 * 32 * 32 * 2
    budget = figures["weights_bytes"] + figures["activation_bytes"] + io
    found = parsed(cli(*command, "--memory", str(budget)))
    assert (found["largest_batch"], found["needed_bytes"], found["io_bytes"]) == (50, budget, io)
    limit = found["smallest_workspace_bytes"]
    build = ("build", "conv.onnx", *SM86, "--shape", "batch=1:50:50", "--quiet")
    assert cli(*build, "-o", "w.engine", "--workspace", limit).code == 0
    less = cli(*build, "-o", "x.engine", "--workspace", max(1, limit - (128 << 10)))
    assert (less.code, "does not fit" in less.text or "no engine fits" in less.text) == (1, True)


def test_fit_says_when_nothing_fits(cli, here: Path) -> None:
    answer = cli("fit", "conv.onnx", *SM86, "--memory", "64KiB", "--json", "--quiet")
    assert answer.code == 3, answer.text
    found = json.loads(answer.stdout)
    assert found["largest_batch"] is None
    assert "even batch 1 needs" in found["reason"]


@pytest.mark.thorough
@no_device
@pytest.mark.timeout(600)
def test_a_sweep_is_built_here_and_left_to_be_measured_elsewhere(cli, here: Path) -> None:
    command = ("optimize", "digits", "--engine", "tensorrt_rtx", "--target", "sm86", "--target", "sm89")
    command = (*command, "--workspace", "sweep", "--batch", "1,64", "--measure-time", "0.2s", "--samples", 64)
    answer = cli(*command, "--out", "run")
    assert answer.code == 0, answer.text
    run = load_run(here / "run")
    assert run.winner is None
    assert run.complete is False
    assert len(run.variants) == 12
    limits: dict[str, list[int]] = {"sm86": [], "sm89": []}
    for variant in run.variants:
        assert variant.status == "built", f"{variant.id}: {variant.reason}"
        assert "no CUDA device here" in variant.reason
        assert variant.target in variant.id
        engine = here / "run" / variant.artifact.path
        record = manifest.read(engine)
        assert record.compute_capabilities == (variant.target,)
        assert variant.workspace_limit_bytes == record.workspace_limit_bytes
        if record.workspace_asked_bytes is not None:
            limits[variant.target].append(record.workspace_asked_bytes)
    for swept in limits.values():
        assert len(set(swept)) == 5
        assert swept == sorted(swept)
    again = cli(*command, "--out", "again")
    assert again.code == 0, again.text
    assert "started" not in again.stderr
    assert load_run(here / "again").variants == run.variants


@pytest.mark.thorough
@no_device
def test_a_limit_that_is_too_small_fails_alone(cli, here: Path) -> None:
    answer = cli(
        *("optimize", "conv.onnx", "--engine", "tensorrt_rtx", *SM86, "--workspace", "4KiB,max", "--batch", "1,64"),
        *("--out", "run"),
    )
    assert answer.code in (0, 1, 3), answer.text
    run = load_run(here / "run")
    assert [one.status for one in run.variants] == ["failed", "built"]
    assert run.variants[0].failure == "does not fit the limit"
    assert "a workspace of 4 KiB" in run.variants[0].reason


@pytest.mark.thorough
@no_device
def test_a_crash_of_the_builder_takes_no_other_variant_down(cli, here: Path) -> None:
    """TensorRT-RTX 1.7.1 dies of attention whose queries are its keys, here behind a product that it folds away."""
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    parts = (node("Mul", "x one", "k"), node("Attention", "x k x", "y"))
    made = model(*parts, x=HEADS, y=HEADS, weights=(one,), opset=23)
    made.ir_version = 11
    onnx.save(made, "m.onnx")
    answer = cli(
        *(
            "optimize",
            "m.onnx",
            "--no-simplify",
            "--engine",
            "tensorrt_rtx",
            "--engine",
            "onnxruntime",
            *SM86,
            "--batch",
            "1,2",
        ),
        *("--measure-time", "0.2s", "--out", "run"),
    )
    assert answer.code in (0, 1, 3), answer.text
    variants = {one.id.split("-")[0]: one for one in load_run(here / "run").variants}
    assert (variants["tensorrt_rtx"].status, variants["tensorrt_rtx"].failure) == ("failed", "crash")
    assert "SIGSEGV" in variants["tensorrt_rtx"].reason
    assert variants["onnxruntime"].status == "measured"


def test_the_header_of_a_fresh_engine_is_where_it_is_read(cli, here: Path) -> None:
    answer = cli("build", "mlp.onnx", "-o", "m.engine", "--target", "portable", *RANGE, "--quiet")
    assert answer.code == 0, answer.text
    header = manifest.read_header(here / "m.engine")
    assert header.version == versions.installed_version("tensorrt_rtx")
    assert header.compute_capabilities == manifest.read(here / "m.engine").compute_capabilities
    assert struct.unpack_from("<I", (here / "m.engine").read_bytes(), 0x20)[0] & 1 == 0


@no_device
@pytest.mark.parametrize("target", [(), ("--target", "sm90")])
def test_a_target_that_cannot_be_had_leaves_no_run_behind(cli, here: Path, target: tuple[str, ...]) -> None:
    answer = cli("optimize", "mlp.onnx", "--engine", "tensorrt_rtx", *target, "--out", "run")
    assert answer.code == 2
    assert "sm86" in answer.text
    assert not (here / "run").exists()


@pytest.mark.thorough
@no_device
def test_history_is_of_the_way_that_was_gone(cli, here: Path) -> None:
    """An engine that another command made of the same graph brings none of that command's steps along."""
    assert cli("export", "digits", "-o", "d.onnx", "--quiet").code == 0
    assert cli("build", "d.onnx", "-o", "d.engine", "--target", "sm120", "--quiet").code == 0
    command = ("optimize", "digits", "--engine", "tensorrt_rtx", "--target", "sm120", "--batch", "1,8", "--out", "run")
    assert cli(*command, "--quiet").code == 0
    (variant,) = load_run(here / "run").variants
    assert [entry.step for entry in variant.history][:3] == ["load", "export", "simplify"]
