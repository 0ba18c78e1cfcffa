"""Test what TensorRT sessions hold, for how long, and what is left when something fails."""

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.engines.cuda_allocator import ACTIVATIONS, OUTPUTS, TRANSFERS, counting
from enginesmith.pipeline.engines.tensorrt import session
from enginesmith.pipeline.engines.tensorrt.build_log import RuntimeLog
from enginesmith.pipeline.engines.tensorrt.loader import Opened
from enginesmith.pipeline.engines.tensorrt.options import SessionOptions
from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession
from enginesmith.pipeline.errors import ModelError, SignatureError, StepOutOfMemory, UsageError
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec
from fake_tensorrt import SIGNATURE, TRT, Config, Engine, Graph, Heap, replace_cuda

UNKNOWN = Signature(inputs=SIGNATURE.inputs, outputs=(*SIGNATURE.outputs, TensorSpec.parse("found:int64:n")))
HERE = Device()  # fakes run on the host, where torch's tensors can be


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from replace_cuda(monkeypatch)


@pytest.fixture
def engine() -> Engine:
    return Engine(RuntimeLog())


def open_session(engine: Engine, signature: Signature = SIGNATURE, **options: Any) -> TensorRTSession:
    opened = Opened(engine, object(), object(), Config(), engine.log, captures_itself=False)
    return TensorRTSession(TRT, opened, signature, HERE, SessionOptions(**options))


def feeds(batch: int, value: float = 1.0) -> dict[str, Array]:
    return {"x": np.full((batch, 4), value, np.float32)}


def out_of_memory(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 800 bytes.\nmore")


def right(found: TensorRTSession, batch: int, value: float = 1.0) -> None:
    np.testing.assert_array_equal(found.run(feeds(batch, value))["y"], np.full((batch, 4), 2 * value))


def test_the_first_profile_that_takes_the_shapes_is_chosen(engine: Engine) -> None:
    engine.profiles = ((1, 1, 1), (2, 4, 8))
    with open_session(engine) as one:
        for batch in (1, 2, 8, 2):
            right(one, batch)
        assert [context.profile for context in engine.contexts] == [0, 1, 1]
        with pytest.raises(SignatureError, match=r"'x' of shape \[9, 4\]; .* from \[2, 4\] to \[8, 4\]") as caught:
            one.bind(feeds(9))
    assert "--shape" in caught.value.remedy


def test_shapes_that_were_not_used_for_longest_are_forgotten(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MOST_CONTEXTS", 2)
    with open_session(engine) as one:
        for batch in (2, 3, 2, 4, 2):
            right(one, batch)
        assert len(engine.made) == 3
        right(one, 3)
        assert len(engine.made) == 4


def test_every_context_works_in_the_memory_of_the_moment(engine: Engine) -> None:
    with open_session(engine) as one:
        small = one.bind(feeds(2, 3.0))
        one.enqueue(small)
        right(one, 8)
        one.enqueue(small)
        np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 6.0))
        held = (one.activation_memory.address, one.activation_memory.bytes)
        assert [context.memory for context in engine.contexts] == [held, held]
        assert [context.placed for context in engine.contexts] == [2, 1]


def test_outputs_stay_as_they_were_fetched(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        first = one.fetch()["y"]
        bound.inputs["x"].zero_()
        one.enqueue(bound)
        np.testing.assert_array_equal(first, np.full((2, 4), 2.0))


def test_a_graph_is_captured_after_a_first_call_and_void_once_the_activations_moved(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        assert bound.graph is None
        for expected in (1, 2, 3):
            one.enqueue(bound)
            assert bound.graph.replays == expected
        assert engine.contexts[0].runs == 2  # the first call, and the capture
        old = bound.graph
        right(one, 8)
        one.enqueue(bound)
        assert old.replays == 3
        one.enqueue(bound)
        assert bound.graph is not old
        np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 2.0))


@pytest.mark.parametrize(("asked", "by_itself"), [(False, False), (True, True)])
def test_nothing_is_captured_unless_that_was_asked_for(engine: Engine, asked: bool, by_itself: bool) -> None:
    """Nor of an engine that captures by itself."""
    opened = Opened(engine, object(), object(), Config(), engine.log, captures_itself=by_itself)
    with TensorRTSession(TRT, opened, SIGNATURE, HERE, SessionOptions(cuda_graphs=asked)) as one:
        bound = one.bind(feeds(2))
        for _ in range(4):
            one.enqueue(bound)
        assert bound.graph is None


@pytest.mark.parametrize("graphs", [False, True])
def test_a_call_enters_its_stream_and_spends_no_time_on_leaving_it(
    engine: Engine, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(engine, cuda_graphs=graphs) as one:
        bound = one.bind(feeds(2))
        assert torch.cuda.current_stream() is None
        right(one, 2)
        assert torch.cuda.current_stream() is None, "whoever asks for a whole answer keeps the stream that they had"
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "stream", lambda stream: pytest.fail("it costs as much as a small engine"))
            patch.setattr(torch.cuda, "device", lambda stream: pytest.fail("it costs as much as a small engine"))
            for _ in range(3):
                one.enqueue(bound)
        assert torch.cuda.current_stream() is one._stream


def test_outputs_of_unknown_shape_are_no_part_of_a_graph(engine: Engine) -> None:
    with open_session(engine, UNKNOWN, cuda_graphs=True) as one, pytest.raises(ModelError, match="'found'") as caught:
        one.bind(feeds(2))
    assert "--cuda-graphs" in caught.value.remedy


@pytest.mark.parametrize(
    ("says", "error", "message"),
    [
        ("Error Code 3: no such tactic", ModelError, "did not run this input"),
        ("Error Code 1: Cuda Runtime (out of memory)", StepOutOfMemory, "out of memory"),
    ],
)
def test_a_run_that_tensorrt_does_not_take(engine: Engine, says: str, error: type[Exception], message: str) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        engine.says = says
        with pytest.raises(error, match=message):
            one.enqueue(bound)


def test_a_sibling_has_contexts_and_activations_of_its_own(engine: Engine) -> None:
    with open_session(engine) as one:
        with one.sibling() as other:
            right(one, 2)
            right(other, 8)
            assert (one.activation_memory.bytes, other.activation_memory.bytes) == (200, 800)
            assert len(engine.contexts) == 2
        right(one, 4)


def test_the_engine_goes_with_its_last_session(engine: Engine) -> None:
    opened = Opened(engine, object(), object(), Config(), engine.log, captures_itself=False)
    first = TensorRTSession(TRT, opened, SIGNATURE, HERE, SessionOptions())
    second = first.sibling()
    first.close()
    first.close()
    assert opened.engine is engine
    second.close()
    assert opened.engine is None
    assert opened.runtime is None


def test_what_a_session_cannot_do_before_and_after(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        with pytest.raises(UsageError, match="nothing was run"):
            one.fetch()
    for call in (lambda: one.bind(feeds(2)), lambda: one.enqueue(bound), one.fetch):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_enqueue_neither_waits_nor_moves_memory(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(3))
        before = (one._stream.waits, one.activation_memory.generation, one.activation_memory.bytes)
        for _ in range(4):
            one.enqueue(bound)
        assert (one._stream.waits, one.activation_memory.generation, one.activation_memory.bytes) == before


def test_size_that_is_not_taken_is_the_profiles(engine: Engine) -> None:
    engine.insists = 1000
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        assert one.activation_memory.bytes == 1000
        placed = engine.contexts[0].placed
        one.enqueue(bound)
        assert engine.contexts[0].placed == placed


def test_size_that_only_a_run_does_not_take_is_the_profiles(engine: Engine) -> None:
    engine.runs_with = 1000
    with open_session(engine) as one:
        right(one, 2)
        assert one.activation_memory.bytes == 1000
        engine.runs_with = 1001
        with pytest.raises(ModelError, match="did not run this input"):
            one.run(feeds(2))
        assert one.activation_memory.bytes == 1000


@pytest.mark.parametrize(("most", "held"), [(1000, 1000), (0, 0)])
def test_size_that_is_not_known_for_shapes_is_the_profiles(engine: Engine, most: int, held: int) -> None:
    engine.needs, engine.most = 0, most
    with open_session(engine) as one:
        one.run(feeds(2))
        assert one.activation_memory.bytes == held
        assert engine.contexts[0].memory[1] == held


def test_forgotten_context_lives_as_long_as_something_is_bound(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MOST_CONTEXTS", 2)
    with open_session(engine) as one:
        kept = one.bind(feeds(1, 7.0))
        for batch in (2, 3, 4):
            one.run(feeds(batch))
        gc.collect()
        assert sorted(context.shape[0] for context in engine.contexts) == [1, 3, 4]
        one.enqueue(kept)
        np.testing.assert_array_equal(one.fetch()["y"], np.full((1, 4), 14.0))


def test_contexts_go_when_the_session_closes(engine: Engine) -> None:
    one = open_session(engine)
    bound = one.bind(feeds(2))
    one.enqueue(bound)
    waits = one._stream.waits
    one.close()
    assert one._stream.waits == waits + 1  # not while they run
    assert bound.context.native is None
    assert engine.contexts == []
    assert one.activation_memory.bytes == 0


def test_capture_that_fails_leaves_the_session_usable(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        Graph.fails = True
        with pytest.raises(ModelError, match="during capture") as caught:
            one.enqueue(bound)
        assert "--cuda-graphs" in caught.value.remedy
        np.testing.assert_array_equal(one.run(feeds(2, 4.0))["y"], np.full((2, 4), 8.0))
        Graph.fails = False
        one.enqueue(bound)
        assert bound.graph.replays == 1


def test_call_that_is_refused_while_captured(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        engine.says = "this layer synchronizes"
        with pytest.raises(ModelError, match="synchronizes"):
            one.enqueue(bound)
        assert bound.graph is None
        assert Graph.capturing is None


def test_graphs_of_two_bounds_of_one_shape(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bounds = [one.bind(feeds(2, value)) for value in (1.0, 2.0)]
        for _ in range(3):
            for value, bound in enumerate(bounds, 1):
                one.enqueue(bound)
                np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 2.0 * value))
        assert [bound.graph.replays for bound in bounds] == [2, 2]


def test_memory_of_an_output_of_unknown_shape_is_freed_with_what_was_bound(engine: Engine) -> None:
    with open_session(engine, UNKNOWN) as one:
        rooms = []
        for _ in range(3):
            bound = one.bind(feeds(1))
            one.enqueue(bound)
            rooms.append(weakref.ref(bound.outputs["found"]))
        del bound
        gc.collect()
        assert [room() is None for room in rooms] == [True, True, False]


def test_output_of_unknown_shape_without_elements(engine: Engine) -> None:
    with open_session(engine, UNKNOWN) as one:
        empty = one.run(feeds(1, -1.0))["found"]
        assert (empty.shape, empty.dtype) == ((0,), np.int64)
        np.testing.assert_array_equal(one.run(feeds(1))["found"], [0, 1, 2, 3])


def test_tensor_without_elements_has_an_address(engine: Engine) -> None:
    with open_session(engine) as one:
        assert one.run(feeds(0))["y"].shape == (0, 4)


def test_engines_that_share_activations(engine: Engine) -> None:
    other = Engine(engine.log)
    with open_session(engine, share_activation_memory=True, cuda_graphs=True) as first:
        bound = first.bind(feeds(2, 3.0))
        for _ in range(2):
            first.enqueue(bound)
        with open_session(other, share_activation_memory=True) as second:
            second.run(feeds(8))
            first.enqueue(bound)  # its graph is of memory that moved
            assert bound.graph is None
            assert engine.contexts[0].memory == other.contexts[0].memory
        assert first.activation_memory.bytes == 800  # still in use
        np.testing.assert_array_equal(first.fetch()["y"], np.full((2, 4), 6.0))
    assert first.activation_memory.bytes == 0


def test_memory_that_runs_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2, 3.0))
        one.enqueue(bound)
        generation = one.activation_memory.generation
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", out_of_memory)
            with pytest.raises(StepOutOfMemory, match=r"Tried to allocate 800 bytes\."):
                one.bind(feeds(8))
        assert one.activation_memory.generation > generation  # graphs of before are void
        one.enqueue(bound)
        np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 6.0))


def test_errors_of_before_are_not_quoted(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        engine.log.take("ERROR", "Error Code 2: OutOfMemory (of long ago)")
        engine.says = "Cuda Runtime (an illegal memory access was encountered)"
        with pytest.raises(ModelError, match="illegal memory access"):
            one.enqueue(bound)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int32", "bool", "int8", "uint8"])
def test_arrays_come_back_as_they_went(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    np.testing.assert_array_equal(session.to_numpy(session.to_torch(array)), array)
    assert session.to_numpy(session.to_torch(array)).dtype == array.dtype


def test_bfloat16_goes_by_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2.0, math.inf], ml_dtypes.bfloat16)
    tensor = session.to_torch(array)
    assert tensor.dtype == torch.bfloat16
    assert session.to_numpy(tensor).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(session.to_numpy(tensor), array)


def test_an_output_that_no_array_can_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="INT4"):
        session.torch_dtype("INT4")


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_strided_read_only_and_scalar_feeds(shape: tuple[int, ...]) -> None:
    array = np.broadcast_to(np.array(1.5, np.float32), shape)
    tensor = session.to_torch(array[..., ::-1] if shape else array)
    assert (tuple(tensor.shape), tensor.is_contiguous()) == (shape, True)
    np.testing.assert_array_equal(session.to_numpy(tensor), array)


def test_what_a_session_takes_is_counted_by_tag(engine: Engine) -> None:
    with counting(0, Heap()) as ledger:
        with open_session(engine, UNKNOWN) as one:
            bound = one.bind(feeds(2))
            assert ledger.account().by_tag == {TRANSFERS: 32, ACTIVATIONS: 200, OUTPUTS: 32}
            one.enqueue(bound)
            assert ledger.account().by_tag[OUTPUTS] == 32 + 64  # eight positions, which only the run tells of
            one.run(feeds(8))
            assert ledger.account().by_tag[ACTIVATIONS] == 800
            del bound
        gc.collect()
        assert ledger.leaks() == {}
        assert ledger.account().unknown_frees == ledger.account().double_frees == 0


def test_nothing_is_counted_unless_that_was_asked_for(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        with counting(0, Heap()) as ledger:
            one.enqueue(bound)
        assert ledger.account().taken == 0
