"""Pruning as a task, to a target or a latency: what is written, what comes back, what trials leave behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import DataError, ModelError, SourceError, UsageError
from enginesmith.pipeline.frameworks.source import rebase, resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.frameworks.torch.surgery import Before, named_tensors
from enginesmith.pipeline.passes.prune import selection
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import read_records, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.prune import (
    TRIALS,
    LatencyTrial,
    Prune,
    PruneToLatency,
    ToEngine,
    TryLatency,
    check_runs,
    choose_trial,
    describe_fastest,
    propose_share,
    read_facts,
)
from graphs import quiet

NETS = f"{Path(__file__).parents[1] / 'data' / 'nets.py'}:mlp"


def loaded(tmp_path: Path, model: str = "digits") -> Artifact:
    out = tmp_path / "loaded"
    out.mkdir()
    effect = Load(source=resolve(model)).run({}, out, quiet)
    return _artifact(out / effect.file, effect.signature)


def _artifact(path: Path, signature=None, kind="torch") -> Artifact:
    return Artifact(kind=kind, path=path, sha256="0" * 64, bytes=0, signature=signature)


def pruned(parent: Artifact, out: Path, target: str = "0.3", feeder: Feeder | None = None, **options) -> Artifact:
    out.mkdir()
    task = Prune(target=PruneTarget.parse(target), options=PruneOptions.model_validate(options), feeder=feeder)
    effect = task.run({"model": parent}, out, quiet)
    return _artifact(out / effect.file, effect.signature)


@pytest.mark.parametrize(
    ("text", "kind", "value", "slug"),
    [
        ("30%", "ratio", 0.3, "prune30"),
        ("macs=-50%", "macs", 0.5, "prune-macs50"),
        ("params=-12.5%", "params", 0.125, "prune-params12_5"),
        ("latency=-40%", "latency", 0.4, "prune-latency40"),
    ],
)
def test_targets_are_read(text: str, kind: str, value: float, slug: str) -> None:
    found = PruneTarget.parse(text)
    assert (found.kind, found.value, found.slug, str(found)) == (kind, value, slug, text)


@pytest.mark.parametrize(
    "text", ["0", "1", "-0.1", "1.5", "nan", "half", "flops=0.5", "macs=-0%", "macs=-1", "macs=-100%", "macs=", ""]
)
def test_targets_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        PruneTarget.parse(text)
    assert "macs=-50%" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "said"),
    [("100%", "below 100 %, and 100 % would leave none"), ("1.5", "above 0 % and below 100 %")]
    + [("0", "none of the channels would be removed"), ("macs=-0%", "none of the MACs would be removed")],
)
def test_a_target_out_of_range_is_told_its_range(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PruneTarget.parse(text)


def test_a_share_is_read_with_and_without_percent() -> None:
    assert PruneTarget.parse("0.3") == PruneTarget.parse("30%")
    assert PruneTarget.parse("macs=-0.5") == PruneTarget.parse("macs=-50%")


def test_a_quantity_without_a_sign_is_refused_with_both_readings() -> None:
    with pytest.raises(
        UsageError, match=r"macs=0\.4 does not say whether 0\.4 of the MACs is removed or left"
    ) as caught:
        PruneTarget.parse("macs=0.4")
    assert caught.value.remedy == "write macs=-40% to remove 40 %, or macs=-60% to leave that much"


def test_stages_lead_to_the_target() -> None:
    left = 1.0
    for stage in PruneTarget.parse("macs=-50%").stages(3):
        left *= stage.left
    assert left == pytest.approx(0.5)
    assert PruneTarget.parse("0.3").stages(1)[0].value == pytest.approx(0.3)


@pytest.mark.thorough
def test_a_pruned_model_comes_back_bit_by_bit_and_can_be_pruned_again(tmp_path: Path) -> None:
    first = pruned(loaded(tmp_path), tmp_path / "first", "macs=-40%")
    second = pruned(first, tmp_path / "second", "macs=-40%")
    once, twice = (saved.load_artifact(one) for one in (first, second))
    image = torch.rand(3, 1, 8, 8)
    assert torch.equal(twice.module(image)[0], saved.load_artifact(second).module(image)[0])
    assert read_facts(second).macs_before == read_facts(first).macs_after
    assert abs(read_facts(first).macs_after / read_facts(first).macs_before - 0.6) <= 0.02
    assert sum(one.numel() for one in twice.module.model.parameters()) < sum(
        one.numel() for one in once.module.model.parameters()
    )
    record = json.loads((second.folder / "model.json").read_text())
    assert record["model"] == "digits"
    assert len(record["surgery"]["history"]) > len(read_facts(second).groups)


@pytest.mark.thorough
def test_the_same_pruning_gives_the_same_bytes(tmp_path: Path) -> None:
    parent = loaded(tmp_path, NETS)
    for name in ("a", "b"):
        pruned(parent, tmp_path / name, importance="random")
    for file in ("model.json", "state.safetensors", "pruning.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.thorough
def test_weights_alone_can_change(tmp_path: Path) -> None:
    parent = pruned(loaded(tmp_path, NETS), tmp_path / "pruned")
    model = saved.load_artifact(parent)
    with torch.no_grad():
        model.module.model.layers[2].bias.add_(1)
    out = tmp_path / "trained"
    out.mkdir()
    saved.save_changed(parent, model, out)
    again = saved.load_artifact(_artifact(out / "model.json"))
    before, after = named_tensors(model.module.model), named_tensors(again.module.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_a_surgery_does_not_tell_of_is_refused(tmp_path: Path) -> None:
    parent = loaded(tmp_path)
    model = saved.load_artifact(parent)
    before = Before(model.module.model)
    model.module.model.bn1.eps = 10.0
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ModelError, match="cannot be built again as it was changed"):
        saved.save_changed(parent, model, out, before.difference(model.module.model))


@pytest.mark.thorough
def test_taylor_needs_data_and_takes_labels(tmp_path: Path) -> None:
    parent = loaded(tmp_path)
    with pytest.raises(UsageError, match="taylor needs samples"):
        pruned(parent, tmp_path / "none", importance="taylor")
    feeder = Feeder(data="digits", samples=16, seed=0)
    found = pruned(parent, tmp_path / "some", "macs=-50%", feeder, importance="taylor")
    assert read_facts(found).importance == "taylor"
    with pytest.raises(DataError):
        pruned(parent, tmp_path / "bad", feeder=Feeder(data="nowhere.npz", samples=4, seed=0), importance="taylor")


@pytest.mark.parametrize("softmax", [False, True])
def test_importance_by_labels_is_of_the_loss_that_is_trained(softmax: bool) -> None:
    """Probabilities have the gradients of their logits; classes that the model does not have are refused."""
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    forward = nn.Sequential(model, nn.Softmax(1)) if softmax else model
    labels = torch.tensor([0, 1, 2] * 2, dtype=torch.int32)
    selection.collect_gradients(model, lambda x: (forward(x),), [((x,), labels)])
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels.long()), model.weight)[0].abs()
    torch.testing.assert_close(model.weight.grad, expected)
    with pytest.raises(DataError, match="labels are from 1 to 3, and the model has 3 classes"):
        selection.collect_gradients(model, lambda x: (forward(x),), [((x,), labels + 1)])


def test_a_model_that_runs_at_one_batch_size_only_is_named(tmp_path: Path) -> None:
    model = saved.load_artifact(loaded(tmp_path))

    class Once(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(2, -1) if x.shape[0] == 2 else x.reshape(7, 11)

    model.module.model.fc = Once()
    with pytest.raises(ModelError, match=r"does not run at batch size 3: in fc \(Once\)"):
        check_runs(model)


def test_a_saved_model_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).parents[1] / "data" / "nets.py"
    project = tmp_path / "project"
    project.mkdir()
    (project / "nets_saved.py").write_text(source.read_text())
    monkeypatch.chdir(project)
    made = pruned(loaded(tmp_path, "nets_saved.py:mlp"), tmp_path / "made", "0.5")
    saved.write_saved(made, project / "small", project / "small")
    assert json.loads((project / "small" / "model.json").read_text())["model"] == "../nets_saved.py:mlp"
    inner = project / "elsewhere"
    inner.mkdir()
    monkeypatch.chdir(inner)
    found = resolve("../small")
    assert (found.form, found.is_torch) == ("saved", True)
    out = tmp_path / "again"
    out.mkdir()
    effect = Load(source=found).run({}, out, quiet)
    again = saved.load_artifact(_artifact(out / effect.file))
    x = torch.randn(3, 4)
    monkeypatch.chdir(project)
    assert torch.equal(again.module(x)[0], saved.load_artifact(made).module(x)[0])
    (project / "nets_saved.py").write_text(source.read_text() + "\n# changed\n")
    (project / "small" / "model.json").write_text("{}")
    with pytest.raises(SourceError, match="is no record of a saved model"):
        saved.read_saved(project / "small", module.LoadOptions(), out)


@pytest.mark.thorough
def test_a_file_that_is_newly_read_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, inner = tmp_path / "project", tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    read = "    [path.read_text() for path in Path(__file__).parent.glob('*.txt')]"
    head = ["from pathlib import Path", "import torch", "def build():"]
    lines = [*head, read, "    return torch.nn.Linear(4, 4), torch.ones(2, 4)"]
    (project / "reading.py").write_text("\n".join(lines))
    (project / "a.txt").write_text("a")
    monkeypatch.chdir(project)
    artifact = loaded(tmp_path, "reading.py:build")
    (project / "b.txt").write_text("b")
    saved.load_artifact(artifact)
    saved.write_saved(artifact, project / "saved", project / "saved")
    (project / "a.txt").write_text("changed")
    with pytest.raises(SourceError, match=r"a\.txt is not as it was"):
        saved.load_artifact(artifact)
    monkeypatch.chdir(inner)
    (again := tmp_path / "again").mkdir()
    with pytest.raises(SourceError, match=r"a\.txt is not as it was"):
        saved.read_saved(project / "saved", module.LoadOptions(), again)


def test_paths_are_taken_along() -> None:
    here, there = Path("/a/b"), Path("/a/b/c")
    assert rebase("net.py:build(x='a:b')", here, there) == "../net.py:build(x='a:b')"
    assert rebase("../net.py:build(x={'a': 1})", there, here) == "net.py:build(x={'a': 1})"
    assert rebase("net.pt2", here, there) == "../net.pt2"
    for kept in ("digits", "resnet50(num_classes=3)", "package.module:name", "hf:org/name", "/x/net.py:build"):
        assert rebase(kept, here, there) == kept


Steps = list[tuple[float, float | None]]


def inputs(folder: Path, steps: Steps) -> dict[str, Artifact]:
    """A small net, and the record of trials: MACs left, latency left."""
    effect = Load(source=resolve(NETS)).run({}, made(folder / "model"), quiet)
    model = Artifact(kind="torch", path=folder / "model" / effect.file, sha256="", bytes=0, signature=effect.signature)
    trials = [LatencyTrial(macs_left=macs, latency_left=left, reason="" if left else "no") for macs, left in steps]
    write_records(made(folder / "before"), trials)
    return {"model": model, "before": record(folder / "before" / "records.json")}


def record(path: Path) -> Artifact:
    return Artifact(kind="record", path=path, sha256="", bytes=0)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def wanted(**options: Any) -> PruneToLatency:
    return PruneToLatency(target=PruneTarget.parse("latency=-40%"), options=PruneOptions(multiple_of=1, **options))


def trial(**options: Any) -> TryLatency:
    return TryLatency(prune=wanted(**options), way=ToEngine(engine=OnnxRuntime(), device=Device(), passes=()))


@pytest.mark.thorough
def test_the_trial_that_keeps_the_most_is_made_again(tmp_path: Path) -> None:
    steps: Steps = [(0.6, 0.8), (0.25, 0.4), (0.5, 0.59), (0.55, 0.7)]
    given = inputs(tmp_path, steps)
    effect = wanted().run(given, made(tmp_path / "out"), quiet)
    assert effect.summary.endswith("; 59.0% of the dense latency, in 4 trials")
    assert any("in too few rounds" in note for note in effect.notes)
    small = Artifact(kind="torch", path=tmp_path / "out" / effect.file, sha256="", bytes=0)
    facts = read_facts(small)
    assert facts.macs_after / facts.macs_before == 0.5
    assert [one["macs_left"] for one in json.loads((tmp_path / "out" / TRIALS).read_text())] == [0.6, 0.25, 0.5, 0.55]
    same = Prune(target=PruneTarget.parse("macs=-50%"), options=PruneOptions(multiple_of=1))
    same.run(given, made(tmp_path / "same"), quiet)
    for name in ("model.json", "state.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


def test_where_none_is_fast_enough_the_fastest_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"latency=-40% is not reached: the fastest of 2 trials takes 70.0% with 20.0%"
    ):
        wanted().run(inputs(tmp_path, [(0.6, 0.9), (0.2, 0.7)]), made(tmp_path / "out"), quiet)


def test_a_search_that_is_over_passes_its_trials_on(tmp_path: Path) -> None:
    given = inputs(tmp_path, [(0.6, 0.8), (0.33, 0.6)])
    effect = trial().run(given, made(tmp_path / "out"), quiet)
    assert effect.summary == "the search is over"
    assert read_records(record(tmp_path / "out" / effect.file)) == read_records(given["before"])


def test_what_would_empty_a_layer_is_a_trial_that_failed(tmp_path: Path) -> None:
    given = inputs(tmp_path, [(0.08, 0.7)])
    effect = trial().run(given, made(tmp_path / "out"), quiet)
    last = read_records(record(tmp_path / "out" / effect.file))[-1]
    assert last["latency_left"] is None
    assert "would empty a layer" in last["reason"]


@pytest.mark.thorough
def test_a_first_trial_that_would_empty_a_layer_does_not_end_the_search(tmp_path: Path) -> None:
    far = wanted().model_copy(update={"target": PruneTarget.parse("latency=-98%")})
    first = trial().model_copy(update={"prune": far})
    effect = first.run(inputs(tmp_path, []), made(tmp_path / "out"), quiet)
    (only,) = read_records(record(tmp_path / "out" / effect.file))
    assert only["latency_left"] is None
    assert "would empty a layer" in only["reason"]


def test_what_is_wrong_with_the_request_ends_the_search_at_once(tmp_path: Path) -> None:
    given = inputs(tmp_path, [])
    with pytest.raises(UsageError, match="lyers"):
        trial(protect=("lyers.0",)).run(given, made(tmp_path / "out"), quiet)


MOST = 12
"""More than any search takes."""


def searched(latency: Callable[[float], float | None], wanted: float) -> list[LatencyTrial]:
    trials: list[LatencyTrial] = []
    while (share := propose_share(trials, wanted)) is not None:
        left = latency(share)
        trials.append(LatencyTrial(macs_left=share, latency_left=left, reason="" if left else "too few"))
        assert len(trials) <= MOST
    return trials


@pytest.mark.parametrize("fixed", [0.0, 0.2, 0.5])
def test_it_comes_near_where_part_of_the_time_stays(fixed: float) -> None:
    trials = searched(lambda share: fixed + (1 - fixed) * share, 0.6)
    best = choose_trial(trials, 0.6)
    assert best is trials[-1]
    assert best.latency_left == pytest.approx(0.6, rel=0.02)


def test_the_first_trial_may_do() -> None:
    assert len(searched(lambda share: share, 0.6)) == 1
    assert propose_share([], 0.6) == 0.6


def test_of_those_that_are_fast_enough_the_largest_is_chosen() -> None:
    steps = [(0.6, 0.8), (0.3, 0.4), (0.45, 0.5), (0.5, 0.7)]
    trials = [LatencyTrial(macs_left=macs, latency_left=left) for macs, left in steps]
    assert choose_trial(trials, 0.6) is trials[2]
    assert propose_share(trials[:3], 0.6) == pytest.approx(0.525)


def test_what_cannot_be_pruned_that_far_is_tried_with_more() -> None:
    trials = searched(lambda share: share if share > 0.5 else None, 0.3)
    assert trials[0].latency_left is None
    assert trials[1].macs_left > trials[0].macs_left
    assert choose_trial(trials, 0.3) is None
    fastest = min(one.latency_left for one in trials if one.latency_left)
    assert describe_fastest(trials).startswith(f"the fastest of {len(trials)} trials takes {fastest:.1%}")


def test_where_none_can_be_had_the_reason_is_told() -> None:
    trials = searched(lambda share: None, 0.3)
    assert (choose_trial(trials, 0.3), describe_fastest(trials)) == (None, "too few")
