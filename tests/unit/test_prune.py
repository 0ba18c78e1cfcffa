"""Pruning as a task: targets, what is written, what comes back, and what a saved model is as a MODEL."""

import json
from pathlib import Path

import pytest
import torch

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import DataError, ModelError, SourceError, UsageError
from enginesmith.pipeline.frameworks.source import rebase, resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.frameworks.torch.surgery import Before, named_tensors
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.tasks.calibrate import Feeder
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.prune import Prune, check_runs, read_facts

NETS = f"{Path(__file__).parents[1] / 'data' / 'nets.py'}:mlp"


def quiet(_: str) -> None:
    return None


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


def test_the_same_pruning_gives_the_same_bytes(tmp_path: Path) -> None:
    parent = loaded(tmp_path, NETS)
    for name in ("a", "b"):
        pruned(parent, tmp_path / name, importance="random")
    for file in ("model.json", "state.safetensors", "pruning.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


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


def test_taylor_needs_data_and_takes_labels(tmp_path: Path) -> None:
    parent = loaded(tmp_path)
    with pytest.raises(UsageError, match="taylor needs samples"):
        pruned(parent, tmp_path / "none", importance="taylor")
    feeder = Feeder(data="digits", samples=16, seed=0)
    found = pruned(parent, tmp_path / "some", "macs=-50%", feeder, importance="taylor")
    assert read_facts(found).importance == "taylor"
    with pytest.raises(DataError):
        pruned(parent, tmp_path / "bad", feeder=Feeder(data="nowhere.npz", samples=4, seed=0), importance="taylor")


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


def test_paths_are_taken_along() -> None:
    here, there = Path("/a/b"), Path("/a/b/c")
    assert rebase("net.py:build(x='a:b')", here, there) == "../net.py:build(x='a:b')"
    assert rebase("../net.py:build(x={'a': 1})", there, here) == "net.py:build(x={'a': 1})"
    assert rebase("net.pt2", here, there) == "../net.pt2"
    for kept in ("digits", "resnet50(num_classes=3)", "package.module:name", "hf:org/name", "/x/net.py:build"):
        assert rebase(kept, here, there) == kept
