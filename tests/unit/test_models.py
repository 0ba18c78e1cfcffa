"""The zoo: what its table says is what its factories build."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from enginesmith.calibration.dataset import embedded
from enginesmith.models import MODELS, bert, vit
from enginesmith.models.digits import Digits, digits
from enginesmith.models.lstm import lstm
from enginesmith.models.train_digits import jitter
from enginesmith.pipeline.errors import SourceError

SMALL = ("digits", "lstm")


@pytest.fixture(autouse=True)
def one_thread():
    """OpenMP's spinning threads make small models slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name, device="cpu"):
    module, factory = MODELS[name].factory.split(":")
    with torch.device(device):
        return getattr(importlib.import_module(module), factory)()


@pytest.mark.parametrize("name", MODELS)
def test_table_holds_parameters_flops_and_signature(name):
    entry = MODELS[name]
    device = "cpu" if name == "digits" else "meta"  # digits comes with weights, and those need memory
    module, example = build(name, device)
    assert not module.training
    assert sum(parameter.numel() for parameter in module.parameters()) == entry.parameters

    assert [spec.name for spec in entry.specs] == list(example)
    for spec in entry.specs:
        value = example[spec.name]
        assert (str(value.dtype).removeprefix("torch."), value.ndim) == (spec.dtype, len(spec.shape))
        assert all(isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, value.shape, strict=True))
        assert value.shape[0] == 2

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        output = module(**{key: value[:1].to(device) for key, value in example.items()})
    assert counter.get_total_flops() == entry.flops
    if len(entry.outputs) > 1:
        assert tuple(output) == entry.outputs
    else:
        assert isinstance(output, torch.Tensor)


def test_known_parameter_counts():
    published = {
        "resnet18": 11_689_512,
        "resnet50": 25_557_032,
        "mobilenet_v2": 3_504_872,
        "vit_b16": 86_567_656,
        "bert_base": 109_482_240,
    }
    assert {name: MODELS[name].parameters for name in published} == published


def test_table_is_light():
    code = "import sys, enginesmith.models; assert not {'torch', 'onnx', 'onnxruntime', 'sklearn'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SMALL)
def test_caller_owns_the_seed(name):
    before = torch.random.get_rng_state()
    torch.manual_seed(7)
    first, example = build(name)
    torch.manual_seed(7)
    second, again = build(name)
    torch.random.set_rng_state(before)
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(example[key], again[key]) for key in example)


def test_example_leaves_the_callers_random_state_alone():
    build("digits")
    with torch.device("meta"):
        before = torch.random.get_rng_state()
        bert.bert_base()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_samples_of_a_batch_do_not_touch_each_other(name):
    module, example = build(name)
    both = module(**example)
    alone = torch.cat([module(**{key: value[row : row + 1] for key, value in example.items()}) for row in (0, 1)])
    torch.testing.assert_close(both, alone)


@pytest.fixture
def small_bert(monkeypatch):
    """BERT with two layers and a hundred words."""
    monkeypatch.setattr(bert, "DEPTH", 2)
    monkeypatch.setattr(bert, "VOCABULARY", 100)


@pytest.mark.usefixtures("small_bert")
@torch.no_grad()
def test_bert_does_not_see_padding():
    module, example = bert.bert_base()
    kept = int(example["attention_mask"][1].sum())
    assert kept < example["attention_mask"].shape[1]
    short = module(**{name: value[1:, :kept] for name, value in example.items()})
    padded = module(**{name: value[1:] for name, value in example.items()})
    torch.testing.assert_close(padded["last_hidden_state"][:, :kept], short["last_hidden_state"])
    torch.testing.assert_close(padded["pooler_output"], short["pooler_output"])


@pytest.mark.usefixtures("small_bert")
def test_bert_loads_a_checkpoint_for_pre_training(tmp_path):
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = {}
    for key, value in bert.Bert().state_dict().items():
        for new, was in old.items():
            key = key.replace(new, was)
        state[f"bert.{key}"] = value + 1
    state["cls.predictions.bias"] = torch.zeros(100)
    save_file(state, tmp_path / "bert.safetensors")
    module, _ = bert.bert_base(weights=str(tmp_path / "bert.safetensors"))
    loaded = module.state_dict()
    assert torch.equal(loaded["embeddings.LayerNorm.weight"], state["bert.embeddings.LayerNorm.gamma"])
    assert torch.equal(loaded["pooler.dense.weight"], state["bert.pooler.dense.weight"])


def test_vit_loads_packed_projections(tmp_path, monkeypatch):
    monkeypatch.setattr(vit, "DEPTH", 1)
    state = {key.replace("in_proj.", "in_proj_"): value for key, value in vit.VisionTransformer(3).state_dict().items()}
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_weight" in state
    save_file(state, tmp_path / "vit.safetensors")
    module, _ = vit.vit_b16(num_classes=3, weights=str(tmp_path / "vit.safetensors"))
    assert torch.equal(module.state_dict()["heads.head.weight"], state["heads.head.weight"])


def test_digits_is_accurate_on_images_it_never_saw():
    module, _ = digits()
    data = embedded("digits", "test")
    with torch.no_grad():
        guess = module(torch.from_numpy(data.arrays["image"])).argmax(1)
    accuracy = (guess == torch.from_numpy(data.labels)).double().mean().item()
    assert len(data) == 357
    assert accuracy >= 0.99


def test_jitter_keeps_most_of_an_image():
    torch.manual_seed(0)
    image = torch.from_numpy(embedded("digits", "train").arrays["image"])
    moved = jitter(image)
    assert moved.shape == image.shape
    assert moved.min() >= 0
    assert moved.max() <= 1
    assert not torch.equal(moved, image)
    assert moved.sum() / image.sum() > 0.9


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_load(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    state = Digits().state_dict()
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    module, _ = digits(weights=str(path))
    assert torch.equal(module.state_dict()["fc.weight"], state["fc.weight"])


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(SourceError, match=r"nowhere\.safetensors"):
        lstm(weights=str(tmp_path / "nowhere.safetensors"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("fc.bias"), r"fc\.bias is missing$"),
        (lambda state: state.update(extra=torch.zeros(1)), "extra is not in the model$"),
        (lambda state: state.update({"fc.bias": torch.zeros(11)}), r"fc\.bias is \[11\] where the model has \[10\]$"),
        (lambda state: state.update(a=torch.zeros(1), b=torch.zeros(1)), r"\(and 1 more\)$"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, change, said):
    state = Digits().state_dict()
    change(state)
    save_file(dict(state), tmp_path / "w.safetensors")
    with pytest.raises(SourceError) as caught:
        digits(weights=str(tmp_path / "w.safetensors"))
    assert re.search(said, caught.value.message)
    assert caught.value.remedy


class Payload:
    """Would create a file if it were ever unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_pickled_code_in_weights_is_never_run(tmp_path):
    torch.save({"fc.weight": Payload(tmp_path / "owned")}, tmp_path / "evil.pt")
    with pytest.raises(SourceError, match="cannot read weights"):
        digits(weights=str(tmp_path / "evil.pt"))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(("name", "content"), [("w.safetensors", b"no"), ("w.pt", b"no"), ("w.pt", b"")])
def test_broken_weights_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match="cannot read weights"):
        digits(weights=str(tmp_path / name))
