"""Faults that random modules (benchmarks/fuzzing_prune.py) and trials showed in pruning, each in a small model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_pruning import DependencyGraph

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.passes.prune import prune as pruner
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.prune.surgery import Group, Removal, Slice, cut, cut_for_now, mask_units
from prunable import IMAGE, Of, head, joined, prune


def test_a_layer_stays_whole_where_torch_pruning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds 9 and 10: it fails in layers behind operations whose sizes it misreads."""
    follow = DependencyGraph.get_pruning_group

    def fail(self: DependencyGraph, layer: nn.Module, *given: object) -> object:
        if layer is model[0]:
            raise IndexError("list index out of range")
        return follow(self, layer, *given)

    monkeypatch.setattr(DependencyGraph, "get_pruning_group", fail)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    done = prune(model, (2, 8))
    assert done.whole["0"] == "torch_pruning cannot follow its channels (IndexError: list index out of range)"
    assert {one.root for one in done.surgery.history} == {"2"}


def test_following_ends_where_a_joined_value_leads_back_to_itself() -> None:
    """Seeds 136, 234, 281 and 483: torch_pruning takes a bilinear layer to keep channels, and finds ever more."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(torch.cat([self.pair(x, x), x], 1)))

    parts = {"first": nn.Linear(8, 12), "pair": nn.Bilinear(12, 12, 3), "middle": nn.Linear(15, 16)}
    done = prune(Of(forward, **parts, last=nn.Linear(16, 3)), (2, 8))
    assert "more than any layer has" in done.whole["first"]
    assert {one.root for one in done.surgery.history} == {"middle"}


def test_a_layer_of_which_no_unit_goes_is_left_as_it_is() -> None:
    """Seed 41: the indices to remove are none, and those that are left may be none."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    parts = Slice("0.weight", 0, "makes", ((0,), ())), Slice("1.weight", 1, "reads", ((0,), ()))
    group = Group("0", "channel", ((0,), (1,)), parts, ("0", "1"))
    before = [value.clone() for value in model.parameters()]
    with mask_units(model, [Removal(group, (1,))]):
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    with cut_for_now(model, [Removal(group, (1,))]):
        assert model[0].out_features == 2
    both = replace(group, slices=(Slice("0.weight", 0, "makes", ((0,), (1,))),))
    cut(model, [Removal(both, (0, 1))])
    assert model[0].weight.shape == (0, 4)


def test_of_groups_that_share_a_channel_one_stays_whole() -> None:
    """Seed 22: each can lose units, and both together take the same ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval()
    indices = tuple((index,) for index in range(4))
    parts = (
        Slice("0.weight", 0, "makes", indices),
        Slice("0.bias", 0, "makes", indices),
        Slice("1.weight", 1, "reads", indices),
    )
    group = Group("0", "channel", indices, parts, ("0", "1"))
    x = torch.randn(2, 4)
    good, bad = pruner.keep_verified(model, lambda: (model(x),), [group, replace(group, root="other")])
    assert [one.root for one in good] == ["0"]
    assert bad == {"other": "it shares channels of 0.bias with 0"}


def two_levels(shared: str) -> Of:
    """One weight for two levels: of two layers, or of one layer and a call of a function."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        high = self.a(x).relu()
        low = self.b(high).relu()
        other = self.h2(low) if shared == "layers" else F.conv2d(low, self.h1.weight, self.h1.bias)
        return self.last(self.h1(high).relu()), self.last(other.relu())

    torch.manual_seed(0)
    parts = {"a": nn.Conv2d(3, 32, 3), "b": nn.Conv2d(32, 32, 3), "h1": nn.Conv2d(32, 32, 1)}
    model = Of(forward, **parts, h2=nn.Conv2d(32, 32, 1), last=head(32))
    model.h2.weight = model.h1.weight
    return model


@pytest.mark.parametrize("steps", [1, 2])
def test_layers_that_share_a_weight_lose_what_both_have(steps: int) -> None:
    """Both make the same channels, and read others; these were cut for one of the two alone."""
    model, x = two_levels("layers").eval(), torch.randn(IMAGE)
    done = pruner.prune(model, lambda: model(x), PruneTarget.parse("30%"), PruneOptions(multiple_of=8, steps=steps))
    assert {one.root for one in done.surgery.history} == {"h1"}
    assert model.h1.weight is model.h2.weight
    assert {root: why for root, why in done.whole.items() if root in "ab"} == {
        "a": "h1 and h2 share h1.weight, and h2 uses it for other channels",
        "b": "h2 and h1 share h1.weight, and h1 uses it for other channels",
    }


def test_a_layer_behind_another_with_its_weight_stays_whole() -> None:
    """Three groups cut the two axes of one weight: without the middle one the others do not fit."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.last(self.e(self.d(self.c(self.a(x).relu()).relu()).relu()).relu())

    parts = {"a": nn.Conv2d(3, 32, 1), "c": nn.Conv2d(32, 64, 1), "d": nn.Conv2d(64, 64, 1), "e": nn.Conv2d(64, 64, 1)}
    model = Of(forward, **parts, last=head(64))
    model.e.weight = model.d.weight
    done = prune(model, target="macs=-10%")
    assert {one.root for one in done.surgery.history} == {"a"}
    assert all("share d.weight" in done.whole[root] for root in "cde")


def test_groups_that_fit_only_if_they_lose_alike_stay_whole() -> None:
    """A function reads the weight of a layer: who takes the same channels from both levels sees nothing."""
    model, x = two_levels("function").eval(), torch.randn(IMAGE)
    with pytest.raises(ModelError, match=r"a: the model does not run without some of them: .*; b: the model does not"):
        pruner.prune(model, lambda: model(x), PruneTarget.parse("30%"), PruneOptions(multiple_of=8))


@pytest.mark.parametrize("norms", [False, True])
def test_groups_are_tried_with_those_that_are_left(norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each can go alone, and the first two of three not together: the last try is of those that go."""

    def fail(model: nn.Module, run: Any, groups: Any) -> str:
        tried.append([group.root for group in groups])
        return "not together" if {"0", "1"} <= set(tried[-1]) else ""

    tried: list[list[str]] = []
    monkeypatch.setattr(pruner, "verify_masking", fail)
    kinds = (nn.Linear(4, 4), nn.LayerNorm(4) if norms else nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(*kinds)
    groups = [
        Group(path, "channel", ((0,), (1,)), (Slice(f"{path}.weight", 0, "makes", ((0,), (1,))),), (path,))
        for path in "012"
    ]
    good, bad = pruner.keep_verified(model, lambda: (), groups)
    assert ([group.root for group in good], bad) == (["0", "2"], {"1": "not together"})
    assert {"0", "2"} in map(set, tried)


def test_a_difference_is_seen_that_the_output_hides() -> None:
    """Seed 0: channels are compared with their mean, and little of that is left in the output."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.first(x)
        return 1e4 + self.head(self.second(x - x.mean(1, keepdim=True)))

    torch.manual_seed(0)
    model = Of(forward, first=nn.Conv2d(3, 16, 1), second=nn.Conv2d(16, 16, 1), head=head(16))
    done = prune(model)
    assert "counts on their number" in done.whole["first"]
    assert {one.root for one in done.surgery.history} == {"second"}


def test_a_group_that_is_rated_in_part_stays_whole() -> None:
    """Seed 551: no embedding, depthwise convolution or LSTM is rated, only the layer that makes the last channels."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.first((x > 0).long())
        x = torch.cat([x, self.more(x)], -1)
        return self.last(self.out(self.recurrent(self.alone(x.transpose(1, 2)).transpose(1, 2))[0]))

    parts = {"first": nn.Embedding(2, 12), "more": nn.Linear(12, 2), "alone": nn.Conv1d(14, 14, 1, groups=14)}
    parts |= {"recurrent": nn.LSTM(14, 8, batch_first=True), "out": nn.Linear(8, 16), "last": nn.Linear(16, 3)}
    done = prune(Of(forward, **parts), (2, 5))
    assert done.whole["first"] == "importance by l2 is known for some of its channels only"
    assert {one.root for one in done.surgery.history} == {"out"}


def test_the_record_names_parameters_that_are_cut() -> None:
    """Seeds 118 and 124: factors of a module's own are cut with the layers."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.Parameter(torch.rand(16, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factors

    model = nn.Sequential(nn.Conv2d(3, 16, 1), Scale(), nn.Conv2d(16, 3, 1))
    done = prune(model, IMAGE, "0.5")
    assert model[1].factors.shape == (8, 1, 1)
    assert set(done.surgery.history[0].members) == {"0", "1.factors", "2"}


def test_the_record_leaves_out_layers_that_lose_nothing() -> None:
    """Seeds 801 and 883: the units that go are all of another one of the layers whose outputs are joined."""
    model = joined(8, 8)
    with torch.no_grad():
        model.a.weight.mul_(1e3)
    done = prune(model, target="0.3", multiple_of=1)
    assert model.a.out_channels == 8
    assert model.b.out_channels < 8
    assert {"b", "both"} <= set(done.surgery.history[0].members)
    assert "a" not in done.surgery.history[0].members


@pytest.mark.parametrize("place", range(8))
def test_a_layer_stays_whole_of_which_one_channel_is_dropped(place: int) -> None:
    """Seed 807: the channel that a forward drops was the one that no trial took away."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(torch.cat([x[:, :place], x[:, place + 1 :]], 1)))

    model = Of(forward, first=nn.Linear(4, 8), middle=nn.Linear(7, 16), last=nn.Linear(16, 3))
    assert "first" in prune(model, (2, 4)).whole


@pytest.mark.parametrize("into_module", [True, False])
def test_a_view_of_a_parameter_may_enter_a_module_or_be_an_output(into_module: bool) -> None:
    """Counting operations looks for the gradient functions of both, as of queries and anchors of a detector."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        anchors = self.anchors.expand(len(x), -1)
        return self.last(self.first(x).relu()), self.other(anchors) if into_module else anchors

    model = Of(forward, first=nn.Linear(8, 32), last=nn.Linear(32, 3), other=nn.Linear(4, 4))
    model.anchors = nn.Parameter(torch.randn(1, 4))
    x = torch.randn(2, 8)
    target, options = PruneTarget.parse("30%"), PruneOptions(multiple_of=8)
    done = pruner.prune(model.eval(), lambda: model(x), target, options)
    assert {one.root for one in done.surgery.history} == {"first"}
    assert all(value.requires_grad for value in model.parameters())


class HeadsByWidth(nn.Module):
    """Attention that knows the width of its heads alone, and no number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.width = 16

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key, value = parts
        made = (query @ key.transpose(2, 3) / 4).softmax(-1) @ value
        return self.out(made.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [4, 8])
@pytest.mark.parametrize("steps", [2, 3])
def test_heads_stay_as_wide_in_later_steps(length: int, steps: int) -> None:
    """The shapes of the products fit heads as wide as the sequence is long, too."""
    model = nn.Sequential(HeadsByWidth(), nn.Linear(64, 3))
    done = prune(model, (1, length, 64), "0.5", steps=steps)
    assert {one.unit for one in done.surgery.history if one.root == "0.query"} == {"head"}
    assert model[0].query.out_features == model[0].out.in_features < 64
    assert model[0].query.out_features % 16 == 0


def test_a_group_is_tried_again_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    verify = pruner.keep_verified

    def count(model: nn.Module, run: Any, groups: Any) -> Any:
        tried.append(len(groups))
        return verify(model, run, groups)

    monkeypatch.setattr(pruner, "keep_verified", count)
    prune(nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 1), head(32)), steps=3)
    assert tried == [2, 2, 2]


def test_channels_whose_readers_are_not_found_are_not_called_an_output() -> None:
    """Keys and values are repeated for the queries that share them, which is not followed."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        key, value = (each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (key, value))
        made = (query @ key.transpose(2, 3)).softmax(-1) @ value
        return self.last(self.wide(made.transpose(1, 2).flatten(2)).relu())

    parts = {"query": nn.Linear(16, 32), "key": nn.Linear(16, 16), "value": nn.Linear(16, 16)}
    done = prune(Of(forward, **parts, wide=nn.Linear(32, 32), last=nn.Linear(32, 3)), (2, 5, 16))
    assert done.whole["value"] == "what reads its channels cannot be followed"
    assert done.whole["last"] == "its channels are an output of the model"
