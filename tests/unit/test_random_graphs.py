"""Random graphs through the cheap passes, and random modules through pruning; benchmarks run many more of them."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SEEDS = range(12)


@pytest.fixture(scope="module")
def fuzzing() -> Iterator[SimpleNamespace]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for folder in (BENCHMARKS / "nets", BENCHMARKS):
            patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "nets", raising=False)  # the tests' own file of networks, where that was loaded
        yield SimpleNamespace(
            **{
                name: importlib.import_module(name)
                for name in ("fuzzing", "random_graphs", "fuzzing_prune", "random_modules")
            }
        )
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_seed_gives_the_same_graph_and_another_one_another(fuzzing: SimpleNamespace) -> None:
    make = fuzzing.random_graphs.make_graph
    assert make(7).SerializeToString() == make(7).SerializeToString()
    assert make(7).SerializeToString() != make(8).SerializeToString()


@pytest.mark.filterwarnings("ignore")
def test_a_seed_gives_the_same_module(fuzzing: SimpleNamespace) -> None:
    """Seed 2 has a spectral norm, whose state PyTorch draws."""
    one, other = (fuzzing.random_modules.build(2)[0].state_dict() for _ in range(2))
    assert any(name.endswith("_u") for name in one)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_graphs_are_of_many_operators_and_sound(fuzzing: SimpleNamespace) -> None:
    operators = Counter[str]()
    for seed in SEEDS:
        model = fuzzing.random_graphs.make_graph(seed)
        onnx.checker.check_model(model, full_check=True)
        operators.update(node.op_type for node in model.graph.node)
    assert len(operators) > 40


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_passes_keep_their_promises_on_random_graphs(fuzzing: SimpleNamespace, tmp_path: Path) -> None:
    kinds = Counter[str]()
    for seed in SEEDS[:4]:
        for outcome in fuzzing.fuzzing.fuzz(
            seed, list(fuzzing.fuzzing.CHEAP), tmp_path / str(seed), lambda _: None, stop=True
        ):
            assert outcome.kind not in fuzzing.fuzzing.FINDINGS, outcome
            kinds[outcome.kind] += 1
    assert kinds["right"] > kinds["refused"] > 0


def test_a_pass_that_changes_the_answer_is_found(fuzzing: SimpleNamespace, tmp_path: Path) -> None:
    """Sparsity changes weights; judged as if it kept the answer, that has to be seen."""
    module = fuzzing.fuzzing
    lossy = module.Trial(module.TRIALS["sparsify unstructured"].step, "fp32")
    found = []
    for seed in range(8):
        subject = module.prepare(seed, tmp_path / str(seed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(module.TRIALS, "sparsify unstructured", lossy)
            found.append(module.apply(subject, "sparsify unstructured", tmp_path / str(seed) / "out").kind)
    assert found.count("wrong") >= found.count("right")
    assert "wrong" in found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_pruning_keeps_its_promises_on_random_modules(fuzzing: SimpleNamespace, tmp_path: Path) -> None:
    module, kinds = fuzzing.fuzzing_prune, Counter[str]()
    for seed in (3, 13):
        for outcome in module.fuzz(seed, list(module.QUICK), tmp_path / str(seed), lambda _: None, stop=True):
            assert outcome.kind not in module.FINDINGS, outcome
            kinds[outcome.kind] += 1
    assert kinds["right"] > 3
