"""Structures that channels are pruned in: what hangs together goes together, and what cannot go stays, for a reason."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.torch import surgery
from enginesmith.pipeline.frameworks.torch.surgery import Before, Surgery, apply_surgery, named_tensors
from enginesmith.pipeline.passes.prune import prune as pruner
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.prune.surgery import Group, Slice
from prunable import IMAGE, Of, head, joined, prune


class Heads(nn.Module):
    """Attention that counts its heads beside its weights."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.num_heads, self.head_size, self.fixed = 4, 4, fixed

    def forward(self, x: Tensor) -> Tensor:
        count = 4 if self.fixed else self.num_heads
        q, k, v = (f(x).unflatten(-1, (count, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out((q @ k.transpose(-1, -2) / 2).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=4), nn.BatchNorm2d(16), nn.ReLU(), head(16))


def squeezed() -> nn.Module:
    """Depthwise, and a squeeze-and-excitation block."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        weight = self.up(F.relu(self.down(y.mean((2, 3)))))
        return self.head(y * weight.sigmoid()[:, :, None, None])

    parts = {"expand": nn.Conv2d(3, 16, 1), "depthwise": nn.Conv2d(16, 16, 3, groups=16)}
    return Of(forward, **parts, down=nn.Linear(16, 8), up=nn.Linear(8, 16), head=head(16))


def dense() -> nn.Module:
    """Each layer reads all before it, as in DenseNet."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.a(x)
        x = torch.cat([x, self.b(x)], 1)
        return self.head(F.relu(self.norm(torch.cat([x, self.c(x)], 1))))

    convolutions = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(8, 8, 3, padding=1), "c": nn.Conv2d(16, 8, 1)}
    return Of(forward, **convolutions, norm=nn.BatchNorm2d(24), head=head(24))


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ConvTranspose2d(8, 16, 2, stride=2),
        nn.PReLU(16),
        nn.Conv2d(16, 8, 1),
        nn.Conv2d(8, 2, 1),
    )


def flattened() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.Linear(16, 3))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 1), head(8))


def without_weights() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.InstanceNorm2d(16), nn.BatchNorm2d(16, affine=False), head(16))


def shared() -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(self.b(F.relu(self.b(x))))

    return Of(forward, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 8, 3, padding=1), head=head(8))


def gated() -> nn.Module:
    """One Linear makes both halves of a gated unit."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        gate, value = self.both(x.flatten(2)).chunk(2, -1)
        return self.out(F.silu(gate) * value)

    return Of(forward, both=nn.Linear(64, 32), out=nn.Linear(16, 3))


STRUCTURES = {one.__name__: one for one in (grouped, squeezed, dense, transposed, flattened, normalized)}
STRUCTURES |= {one.__name__: one for one in (without_weights, shared, gated)}


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_hangs_together_goes_together_and_comes_back_from_the_record(name: str) -> None:
    torch.manual_seed(0)
    model = STRUCTURES[name]()
    done = prune(model)
    assert done.after.macs < done.before.macs
    assert done.after.parameters < done.before.parameters
    assert done.surgery.history
    assert 0.15 <= 1 - done.channels_after / done.channels_before <= 0.45
    again = STRUCTURES[name]().eval()
    apply_surgery(Surgery.model_validate_json(done.surgery.model_dump_json()), again)
    again.load_state_dict(model.state_dict())
    for size in (1, 3):
        x = torch.randn(size, *IMAGE[1:])
        assert torch.equal(model(x), again(x))


def test_groups_of_a_grouped_convolution_lose_alike() -> None:
    model = grouped()
    prune(model, target="0.5", multiple_of=1)
    assert (model[1].in_channels, model[1].out_channels, model[1].groups) == (8, 8, 4)


@pytest.mark.parametrize("steps", [1, 2])
def test_channels_that_go_in_blocks_are_counted_one_by_one(steps: int) -> None:
    """A unit is a channel of each of four blocks; the record has the channels, as the layer counts them."""
    model = grouped()
    before = model[0].weight.detach().clone()
    done = prune(model, target="0.5", multiple_of=1, steps=steps)
    history = [one for one in done.surgery.history if one.root == "0"]
    assert (history[0].before, history[-1].after) == (16, model[0].out_channels) == (16, 8)
    for one in history:
        assert len(one.kept) == one.after
        before = before[list(one.kept)]
    assert torch.equal(before, model[0].weight)
    lost = sum((one.before - one.after) * (one.width or 0) for one in done.surgery.history)
    assert lost == done.channels_before - done.channels_after


def test_a_layer_that_would_be_empty_is_described_by_its_channels() -> None:
    with pytest.raises(UsageError, match=r"0 has 16 channels and must keep 4"):
        prune(grouped(), target="0.99", multiple_of=1)


def test_heads_go_whole_and_their_number_is_kept_in_line() -> None:
    model = nn.Sequential(Heads(), nn.Linear(16, 3))
    done = prune(model, (2, 5, 16), "0.5")
    heads = next(one for one in done.surgery.history if one.unit == "head")
    assert (heads.before, heads.after, heads.width) == (4, 2, 4)
    assert model[0].num_heads == 2
    assert done.surgery.attributes["0"] == {"num_heads": 2}
    assert (model[0].value.out_features, model[0].head_size) == (8, 4)


def test_heads_of_a_number_written_in_forward_stay() -> None:
    model = nn.Sequential(Heads(fixed=True), nn.Linear(16, 3))
    done = prune(model, (2, 5, 16), "0.25")
    assert "its heads cannot go one by one" in done.whole["0.query"]
    assert model[0].query.out_features == 16
    assert {one.root for one in done.surgery.history} == {"0.out"}


def encoder(**options: object) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=True), nn.Linear(16, 3)).eval()


def test_attention_of_torch_loses_heads_and_comes_back_from_the_record() -> None:
    model = encoder()
    done = prune(model, (2, 5, 16), "0.5")
    heads = next(one for one in done.surgery.history if one.unit == "head")
    assert (heads.before, heads.after) == (4, 2)
    assert done.surgery.attention == ("0.layers.0.self_attn",)
    assert model[0].layers[0].self_attn.q_proj.out_features == 8
    again = encoder()
    apply_surgery(Surgery.model_validate_json(done.surgery.model_dump_json()), again)
    again.load_state_dict(model.state_dict())
    x = torch.randn(3, 7, 16)
    assert torch.equal(model(x), again(x))
    model[0](x, src_key_padding_mask=torch.zeros(3, 7, dtype=torch.bool))  # no way that looks for packed weights


def test_attention_of_torch_stays_as_it_is_where_no_head_may_go() -> None:
    model = encoder()
    done = prune(model, (2, 5, 16), "0.25", heads=False)
    assert type(model[0].layers[0].self_attn) is nn.MultiheadAttention
    assert {one.root for one in done.surgery.history} == {"0.layers.0.linear1"}
    model = encoder()
    done = prune(model, (2, 5, 16), "0.25", protect=("0.layers.0.self_attn",))
    assert done.surgery.attention == ()
    assert type(model[0].layers[0].self_attn) is nn.MultiheadAttention
    assert model[0].use_nested_tensor


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_replaced_attention_answers_as_that_of_torch(first: bool, weights: bool) -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(16, 4, batch_first=first, kdim=6, vdim=10).eval()
    model = nn.ModuleDict({"one": whole})
    surgery.replace(model, surgery.replaceable(model))
    padding = torch.zeros(2 if first else 5, 5 if first else 2, dtype=torch.bool)
    padding[:, -1] = True
    causal = torch.ones(5 if first else 2, 5 if first else 2, dtype=torch.bool).triu(1)
    given = [torch.randn(2, 5, size) for size in (16, 6, 10)]
    for masks in ({}, {"attn_mask": causal}, {"attn_mask": causal, "key_padding_mask": padding}):
        expected, answer = (
            whole(*given, need_weights=weights, **masks),
            model["one"](*given, need_weights=weights, **masks),
        )
        assert torch.allclose(expected[0], answer[0], atol=1e-6)
        assert (answer[1] is None) == (not weights)
        assert not weights or torch.allclose(expected[1], answer[1], atol=1e-6)
    alone = [one[0] for one in given]
    assert torch.allclose(whole(*alone)[0], model["one"](*alone)[0], atol=1e-6)


def test_a_padding_mask_has_a_row_for_each_query() -> None:
    masks: list[Tensor] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is F.scaled_dot_product_attention:
                masks.append(args[3])
            return function(*args, **(kwargs or {}))

    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    module = surgery.Attention(nn.MultiheadAttention(16, 4, batch_first=True).eval())
    with Watched():
        module(x, y, y, key_padding_mask=padding, need_weights=False)
    assert masks[0].shape == (2, 1, 5, 7)


def test_one_attention_whose_heads_have_to_stay_does_not_speak_for_the_others() -> None:
    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.a(x, x, x, average_attn_weights=False)
        return self.last(self.b(x + y, y, y)[0]), weights

    torch.manual_seed(0)
    first, second = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))
    model = Of(forward, first=nn.Linear(16, 16), a=first, b=second, last=nn.Linear(16, 3)).eval()
    x = torch.randn(2, 5, 16)
    done = pruner.prune(model, lambda: model(x), PruneTarget.parse("0.25"), PruneOptions())
    assert "its heads cannot go one by one: an output becomes [2, 3, 5, 5]" in done.whole["a.q_proj"]
    assert [(one.root, one.unit) for one in done.surgery.history] == [("b.q_proj", "head")]


def test_transposed_convolutions_in_groups_stay_where_weights_do_not_rank_them() -> None:
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 32, 1), nn.ConvTranspose2d(32, 32, 2, 2, groups=4), nn.Conv2d(32, 32, 1), head(32)]
    done = prune(nn.Sequential(*parts), target="0.25")
    assert "1, a transposed convolution in groups" in done.whole["0"]
    assert {one.root for one in done.surgery.history} == {"2"}
    done = prune(nn.Sequential(*parts), target="0.25", importance="random")
    assert "0" in {one.root for one in done.surgery.history}


def test_a_note_names_narrow_widths_of_earlier_steps_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), head(8))
    done = prune(model, target="0.4", steps=3, multiple_of=16)
    narrow = [one.root for one in done.surgery.history]
    assert {one.step for one in done.surgery.history} != {3}
    assert all(f"{root} (" in done.notes[0] for root in narrow)


def test_a_forward_that_a_normalization_was_given_is_still_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 3))
    wrapped = model[1].forward
    model[1].forward = given = lambda x: wrapped(x) * 3
    prune(model, (4, 16), "0.5")
    assert vars(model[1])["forward"] is given


def test_a_second_pruning_keeps_the_multiples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 64, 1), head(64))
    for _ in range(3):
        done = prune(model, target="macs=-40%", scope="global")
        assert [layer.out_channels % 8 for layer in model[:3]] == [0, 0, 0]
        assert done.notes == () or "multiples" in done.notes[0]
    assert model[1].out_channels < 32


def test_narrow_layers_are_cut_below_the_multiple_only_where_the_target_needs_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 64, 3), nn.Conv2d(64, 64, 3), head(64))
    prune(model, target="macs=-50%")
    assert model[0].out_channels == 8
    done = prune(model, target="macs=-97%")
    assert any("no multiples of 8" in note for note in done.notes)


def test_a_view_of_a_fixed_size_keeps_its_layer_whole_and_lets_the_others_go() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).view(-1, 8 * 64)))

    model = Of(forward, first=nn.Conv2d(3, 8, 1), middle=nn.Linear(512, 16), last=nn.Linear(16, 3))
    done = prune(model)
    assert "does not run without some of them: in " in done.whole["first"] or "RuntimeError" in done.whole["first"]
    assert {one.root for one in done.surgery.history} == {"middle"}


@pytest.mark.parametrize("recurrent", [nn.GRU, nn.LSTM])
def test_recurrent_layers_are_refused_by_name(recurrent: type[nn.RNNBase]) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0])

    model = Of(forward, recurrent=recurrent(8, 8, batch_first=True), last=nn.Linear(8, 3))
    with pytest.raises(ModelError, match=r"recurrent|no layer of this model can lose channels"):
        prune(model, (2, 5, 8))


def test_shared_tensors_stay_shared() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) + F.relu(self.b(x)))

    def build() -> nn.Module:
        model = Of(forward, a=nn.Linear(8, 16), b=nn.Linear(8, 16), c=nn.Linear(16, 3))
        model.b.weight = model.a.weight
        return model

    model = build()
    done = prune(model, (2, 8), "0.5")
    assert model.a.weight is model.b.weight
    again = build()
    apply_surgery(done.surgery, again)
    assert again.a.weight.shape == (8, 8)
    assert again.a.weight is again.b.weight


def test_surgery_composes() -> None:
    model = flattened().eval()
    first = prune(model, target="0.25").surgery
    both = first.then(prune(model, target="0.25").surgery)
    again = flattened()
    apply_surgery(both, again)
    assert {name: value.shape for name, value in named_tensors(again).items()} == {
        name: value.shape for name, value in named_tensors(model).items()
    }
    assert both == Before(flattened().eval()).difference(model, both.history)


@pytest.mark.parametrize("scope", ["global", "uniform"])
@pytest.mark.parametrize("target", ["macs=-50%", "params=-50%"])
def test_a_target_is_met_within_two_points(target: str, scope: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3), head(64))
    done = prune(model, target=target, scope=scope, multiple_of=4)
    before, after = (one.macs if "macs" in target else one.parameters for one in (done.before, done.after))
    assert abs(after / before - 0.5) <= 0.02
    assert all(layer.out_channels % 4 == 0 for layer in (model[0], model[2], model[3]))


def test_named_layers_stay_whole() -> None:
    model = grouped()
    done = prune(model, protect=("4.*",))
    assert done.surgery.history
    model = flattened()
    done = prune(model, protect=("0",))
    assert done.whole["0"] == "it is protected, as requested"
    assert model[0].out_channels == 8
    with pytest.raises(UsageError, match="no layer of the model is called 'fist'"):
        prune(flattened(), protect=("fist",))


def test_what_would_empty_a_layer_is_refused_by_name_and_the_limit_holds() -> None:
    with pytest.raises(
        UsageError,
        match=r"would empty a layer: 0 has 8 channels and must keep 1; the largest possible target is 91\.6%",
    ):
        prune(flattened(), target="0.99")
    prune(flattened(), target="0.916")
    with pytest.raises(UsageError, match=r"the largest possible target is macs=-\d+\.\d%"):
        prune(flattened(), target="macs=-99%")


def test_a_model_that_gradients_do_not_follow_is_refused_with_the_line() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)

    expected = (
        r"no output .* depends on its parameters .* by no_grad\(\) at test_prune_structures.py:\d+ in the forward"
    )
    with pytest.raises(ModelError, match=expected):
        prune(Of(forward, layer=nn.Linear(8, 8)), (2, 8))


class ThroughNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True)


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Mixing.apply(x)


class Deciding(nn.Module):
    """Two ways through it, of which the example takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() < 1e9 else self.other(x)


def test_layers_before_a_way_through_numpy_stay_and_the_line_is_said() -> None:
    model = nn.Sequential(nn.Linear(8, 16), ThroughNumpy(), nn.Linear(16, 16), nn.Linear(16, 3))
    done = prune(model, (2, 8))
    assert re.search(
        r"leaves autograd, by detach\(\) at test_prune_structures.py:\d+ in 1 \(ThroughNumpy\)", done.whole["0"]
    )
    assert {one.root for one in done.surgery.history} == {"2"}


def test_an_autograd_function_that_mixes_channels_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 16), Mixed(), nn.Linear(16, 16), nn.Linear(16, 3))
    done = prune(model, (2, 8))
    assert re.search(r"autograd function Mixing \(test_prune_structures.py:\d+\)", done.whole["0"])


def test_a_forward_that_decides_by_values_which_layers_run_is_refused_with_the_line() -> None:
    expected = r"decides by what values are, by bool\(\) at test_prune_structures.py:\d+ in 1 \(Deciding\), .* 1.other"
    with pytest.raises(ModelError, match=expected):
        prune(nn.Sequential(nn.Linear(8, 16), Deciding(), nn.Linear(16, 3)), (2, 8))


def test_batch_norm_ranks_by_its_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), head(8))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1.0, 0.1, 1.0, 0.2, 1.0, 0.3, 1.0, 0.4]))
    done = prune(model, target="0.5", importance="bn")
    assert done.surgery.history[0].kept == (0, 2, 4, 6)


def test_taylor_ranks_by_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).eval()
    x = torch.randn(2, 4)

    def gradients() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model[0].weight.grad[2:6] = 1.0

    target, options = PruneTarget.parse("0.5"), PruneOptions(importance="taylor")
    done = pruner.prune(model, lambda: (model(x),), target, options, gradients=gradients)
    assert done.surgery.history[0].kept == (2, 3, 4, 5)


def test_heads_stay_where_that_is_asked_for() -> None:
    done = prune(nn.Sequential(Heads(), nn.Linear(16, 3)), (2, 5, 16), "0.25", heads=False)
    assert done.whole["0.query"] == "attention heads are to stay"


def test_steps_on_the_way_keep_the_multiple() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 64, 3), head(64))
    done = prune(model, target="0.3", steps=3, multiple_of=16)
    assert [layer.out_channels % 16 for layer in model[:3]] == [0, 0, 0]
    assert not any("no multiples of" in note for note in done.notes)


def test_a_mean_over_channels_keeps_its_layer_whole() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).mean(1).flatten(1)))

    done = prune(Of(forward, first=nn.Conv2d(3, 8, 1), middle=nn.Linear(64, 16), last=nn.Linear(16, 3)))
    assert "first" in done.whole
    assert {one.root for one in done.surgery.history} == {"middle"}


def test_several_steps_end_where_one_does() -> None:
    torch.manual_seed(0)
    done = prune(nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), head(64)), target="macs=-50%", steps=3)
    assert abs(done.after.macs / done.before.macs - 0.5) <= 0.02
    assert {one.step for one in done.surgery.history} == {1, 2, 3}


def test_channels_that_leave_the_model_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    with pytest.raises(ModelError, match="no layer of this model can lose channels"):
        prune(model)


def test_a_weight_that_is_computed_keeps_its_layers_whole() -> None:
    """The channels of weight norm are in two parameters, of which none is the weight."""
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 1))
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), normed, nn.Conv2d(16, 16, 1), head(16))
    done = prune(model, target="macs=-30%")
    assert "computed from other parameters" in done.whole["0"]
    assert model[0].out_channels == 16


def test_no_layer_is_emptied_that_has_only_some_of_the_units() -> None:
    model = joined(2, 14)
    with torch.no_grad():
        model.a.weight.mul_(1e-3)
    prune(model, target="60%", multiple_of=1)
    assert model.a.out_channels >= 1
    assert model(torch.rand(IMAGE)).shape == (2, 3)


def test_a_layer_stays_whole_of_which_only_the_largest_channels_count_apart() -> None:
    """A maximum over channels depends on few of them, which are not among those that are taken away first."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.second(x * x.amax(1, keepdim=True).sigmoid()))

    torch.manual_seed(0)
    model = Of(forward, first=nn.Conv2d(3, 24, 1), second=nn.Conv2d(24, 16, 1), head=head(16))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(24)).tolist()
    with torch.no_grad():
        assert model.first.bias is not None
        model.first.bias[order[10]] = 9.0
    done = prune(model, target="macs=-20%")
    assert "first" in done.whole
    assert model.first.out_channels == 24


def test_verifying_takes_no_unit_that_is_the_last_one_of_a_layer() -> None:
    one = [
        Slice(f"parts.{at}.weight", 0, "makes", tuple((0,) if unit == at else () for unit in range(9)))
        for at in range(7)
    ]
    wide = Slice("wide.weight", 0, "makes", (*((),) * 7, (0,), (1,)))
    group = Group("wide", "channel", tuple((unit,) for unit in range(9)), (*one, wide), ("wide",))
    few, rest, _ = pruner._draw(group)
    assert len(few) == 1
    assert few[0] in (7, 8)
    assert rest == ()


def test_a_norm_by_the_root_mean_square_shrinks_with_its_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.ReLU(), nn.Linear(16, 3))
    done = prune(model, (2, 8), "0.5")
    assert model[1].normalized_shape == model[1].weight.shape == (8,)
    assert done.surgery.history[0].members == ("0", "1", "3")
    again = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.ReLU(), nn.Linear(16, 3))
    apply_surgery(done.surgery, again)
    assert again[1].normalized_shape == (8,)
