"""What the builder says: figures, a log that is the same each time, and errors by class. Texts are TensorRT's own."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.pipeline.engines.tensorrt.build_log import BuildLog, Figures, logger
from enginesmith.pipeline.engines.tensorrt.builder import build_error
from enginesmith.pipeline.engines.tensorrt.parser import _refusal, _Refused, plain
from enginesmith.pipeline.errors import BuilderFailed, BuildError, LimitTooSmall, UnsupportedGraph
from enginesmith.pipeline.frameworks.onnx import model_file

TWO_PROFILES = """\
Max Scratch Memory: 512 bytes
Total Activation Memory: 512 bytes
Max Scratch Memory: 8224768 bytes
Total Activation Memory: 8224768 bytes
Total Weights Memory: 98560 bytes
"""
TURING = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:337: check_turing_op_compatibility] Cannot "
    "compile operation 'one' for Turing (SM75): FP32 GEMM is not supported. In compileGraph at "
    "/_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
WORKSPACE = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic Selection: no "
    "tactics to implement the operation within workspace limit. Consider increase the allowed workspace size if "
    "applicable.; [tactic.cpp:264: run] Error during tactic selection. In compileGraph at "
    "/_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
OUT_OF_MEMORY = (
    "[virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory (Requested size was 57344 bytes.)"
)
NO_IMPLEMENTATION = (
    "Error Code 10: Internal Error (Could not find any implementation for node {ForeignNode[one...two]}.)"
)
SKIPPED = "Skipping tactic 0x0 due to insufficient memory on requested size of 4294967296 detected for tactic 0x1."
NO_DRIVER = "MyelinCheckException: graph_jit.cpp:278: CHECK(status == CUDA_SUCCESS) failed."
CUDA_35 = "catchCudaError: Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient)"


def taken(*messages: tuple[str, str]) -> BuildLog:
    log = BuildLog()
    for severity, text in messages:
        log.take(severity, text)
    return log


def infos(text: str) -> BuildLog:
    return taken(*(("INFO", line) for line in text.splitlines()))


def test_of_several_profiles_the_largest_figure_counts() -> None:
    expected = Figures(weights_bytes=98560, activation_bytes=8224768, scratch_bytes=8224768)
    assert infos(TWO_PROFILES).figures == expected
    assert infos("\n".join(reversed(TWO_PROFILES.splitlines()))).figures == expected


def test_what_the_builder_did_not_say_is_unknown() -> None:
    assert taken(("INFO", "Compiler backend is used during engine build.")).figures == Figures()


def test_the_builders_own_peak_is_read_in_bytes() -> None:
    line = "[MemUsageStats] Peak memory usage of TRT CPU/GPU memory allocators: CPU 3 MiB, GPU 17 MiB"
    assert infos(line).figures == Figures(build_device_peak_bytes=17 << 20)


def test_times_and_the_machine_are_left_out_of_the_log() -> None:
    first, second = (
        infos(f"took {ms}ms to assign 1 blocks\nEngine generation completed in {s} seconds.\n[MemUsageStats] CPU {s}")
        for ms, s in (("0.011934", "0.03"), ("1.5", "12"))
    )
    assert first.text == second.text
    assert first.text == "[INFO] took … to assign 1 blocks\n[INFO] Engine generation completed in ….\n"


def test_messages_reach_the_steps_log_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    taken(("WARNING", "odd"), ("INFO", "took 1 ms"), ("VERBOSE", "chatter"))
    assert capsys.readouterr().err == "[WARNING] odd\n[INFO] took 1 ms\n"


def test_the_dump_of_layers_is_kept_and_other_chatter_is_not() -> None:
    log = taken(("VERBOSE", "Layers:\nName: a"), ("VERBOSE", "Trying tactic 7"))
    assert log.layers == "Layers:\nName: a"
    assert log.text == ""


def test_errors_that_only_say_there_is_no_driver_are_not_taken_for_the_cause() -> None:
    log = taken(("ERROR", CUDA_35), ("INTERNAL_ERROR", NO_DRIVER), ("WARNING", SKIPPED))
    assert log.errors == [NO_DRIVER]
    assert log.warnings == [SKIPPED]


def test_a_logger_for_tensorrt_hands_on_the_severity_by_name() -> None:
    class ILogger:
        pass

    log = BuildLog()
    logger(type("Trt", (), {"ILogger": ILogger}), log).log(SimpleNamespace(name="ERROR"), "broken")
    assert log.errors == ["broken"]
    assert "broken" in log.text


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Two products, the first from a module."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy")
    first = helper.make_node("MatMul", ["x", "x"], ["h"], name="one")
    first.metadata_props.add(key=model_file.MODULE_KEY, value="encoder.proj")
    nodes = [first, helper.make_node("MatMul", ["h", "x"], ["y"], name="two")]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), path)
    return path


def error(graph: Path, errors: Sequence[str], warnings: Sequence[str] = (), workspace: int | None = None) -> BuildError:
    messages = [*(("WARNING", text) for text in warnings), *(("ERROR", text) for text in errors)]
    return build_error(taken(*messages), graph, workspace, "tensorrt_rtx")


def test_what_a_target_lacks_names_the_node_and_its_module(graph: Path) -> None:
    found = error(graph, [TURING])
    assert type(found) is UnsupportedGraph
    assert "MatMul 'one' (of the module 'encoder.proj')" in found.message
    assert "FP32 GEMM is not supported" in found.message
    assert "build --check" in found.remedy


@pytest.mark.parametrize("said", [[WORKSPACE], [OUT_OF_MEMORY], [OUT_OF_MEMORY, NO_IMPLEMENTATION]])
def test_too_small_a_workspace_is_told_from_what_is_unsupported(said: list[str], graph: Path) -> None:
    found = error(graph, said, workspace=1 << 20)
    assert type(found) is LimitTooSmall
    assert "a workspace of 1 MiB" in found.message
    assert "--workspace sweep" in found.remedy


def test_the_size_that_was_asked_for_is_said(graph: Path) -> None:
    assert "57344 bytes" in error(graph, [OUT_OF_MEMORY], workspace=1 << 20).message
    assert "4294967296 bytes" in error(graph, [NO_IMPLEMENTATION], [SKIPPED]).message


def test_no_implementation_after_skipped_tactics_is_a_lack_of_memory(graph: Path) -> None:
    found = error(graph, [NO_IMPLEMENTATION], [SKIPPED])
    assert type(found) is LimitTooSmall
    assert "ran out of memory" in found.message
    assert "workspace" not in found.message


def test_no_implementation_without_them_is_unsupported(graph: Path) -> None:
    assert type(error(graph, [NO_IMPLEMENTATION])) is UnsupportedGraph


@pytest.mark.parametrize(("said", "words"), [([NO_DRIVER], "CHECK"), ([], "nothing")])
def test_other_failures_are_the_builders_own(said: list[str], words: str, graph: Path) -> None:
    found = error(graph, said)
    assert type(found) is BuilderFailed
    assert words in found.message


def refused(node: int, operator: str, name: str, code: str, text: str) -> _Refused:
    return _Refused(
        SimpleNamespace(
            node=lambda: node,
            node_operator=lambda: operator,
            node_name=lambda: name,
            code=lambda: SimpleNamespace(name=code),
            desc=lambda: text,
        )
    )


@pytest.mark.parametrize(
    ("text", "words", "remedy"),
    [
        (
            'creator && "Plugin not found, are the plugin name, version, and namespace correct?"',
            "does not have this operator",
            "replace the operator",
        ),
        ("NonZero plugin creator version 1 was not found in plugin registry.", "does not have", "replace the operator"),
        ('tensor && "Failed to add input."', "'encoder.proj'): Failed to add input", "inputs and attributes"),
        ("(a || b): Scale coefficients must all be positive", "'encoder.proj'): Scale", "inputs and attributes"),
        ("Assertion failed: shiftIsAllZeros(zeroPoint): Non-zero zero point is not supported.", "not 0", "symmetrical"),
        (
            "bias_dq: input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8.",
            "int32",
            "biases in float",
        ),
        (
            "ElementWiseOperation SUM must have same input types. But they are of types Half and Float.",
            "differ",
            "cast",
        ),
        ("false", "does not have this operator", "replace the operator"),
    ],
)
def test_words_of_the_parser_are_put_in_ours(text: str, words: str, remedy: str, graph: Path) -> None:
    found = _refusal([refused(0, "MatMul", "one", "UNSUPPORTED_NODE", text)], graph)
    assert "MatMul 'one' (of the module 'encoder.proj')" in found.message
    assert words in found.message
    assert remedy in found.remedy


def test_an_operator_of_ones_own_is_a_plugin_s(graph: Path) -> None:
    own = onnx.load(graph)
    own.graph.node[0].domain = "acme"
    onnx.save(own, graph)
    found = _refusal([refused(0, "MatMul", "one", "INVALID_NODE", 'creator && "Plugin not found, are …?"')], graph)
    assert "no importer and no plugin" in found.message
    assert "--plugins FILE.so" in found.remedy


def test_an_error_that_names_a_node_comes_first_and_long_lists_are_cut(graph: Path) -> None:
    errors = [refused(-1, "", "", "INVALID_GRAPH", f"odd {index}") for index in range(6)]
    found = _refusal([*errors, refused(0, "MatMul", "one", "INVALID_NODE", "Non-zero zero point")], graph)
    assert found.message.startswith("TensorRT's parser refuses MatMul 'one'")
    assert found.message.endswith("and 3 more")
    assert "symmetrically" in found.remedy


def test_a_parser_without_a_reason_is_said_to_have_none(graph: Path) -> None:
    assert "without a reason" in _refusal([], graph).message


def test_a_node_is_found_by_its_name_where_its_index_is_anothers(graph: Path) -> None:
    assert "of the module 'encoder.proj'" in _refusal([refused(1, "Conv", "one", "X", "odd")], graph).message
    assert "Conv 'gone'" in _refusal([refused(7, "Conv", "gone", "X", "odd")], graph).message


def test_source_lines_are_no_part_of_a_message() -> None:
    text = "ITensor::getDims: Error Code 4: API Usage Error (add: odd types. In validateTypes at /_src/a/node.cpp:40)"
    assert plain(text) == "ITensor::getDims: (add: odd types"
