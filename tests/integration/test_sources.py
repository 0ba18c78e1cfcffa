"""Every form of MODEL, through the command line, against what PyTorch itself answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        for number, weight in enumerate(self.parameters()):
            nn.init.constant_(weight, 0.1 * (number + 1))

    def forward(self, x):
        return self.layers(x)

def build(depth=1, width=4):
    return Net(depth, width), torch.ones(2, width)

ready = Net(2, 4)
ready.example_input_array = torch.ones(2, 4)
"""


def net(depth: int = 1, width: int = 4) -> nn.Module:
    """Make the same in this process."""
    found: dict[str, object] = {}
    exec(NET, found)
    module: nn.Module = found["Net"](depth, width)  # type: ignore[operator]
    return module.eval()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Exported:
    """An ONNX file that can be run."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(path, load_external_data=False).graph
        dims = ([d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.input)
        self.inputs = dict(zip((value.name for value in graph.input), dims, strict=True))
        self.outputs = [value.name for value in graph.output]
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])

    def __call__(self, **feeds: torch.Tensor) -> list[torch.Tensor]:
        given = {name: value.numpy() for name, value in feeds.items()}
        return [torch.from_numpy(found) for found in self._session.run(None, given)]


@pytest.fixture
def export(cli, folder: Path):
    """Exports MODEL and opens what came out."""

    def run(model: object, *options: str, exporter: str = "torchscript") -> Exported:
        """By the exporter that is quicker on small models, unless another one is asked for."""
        answer = cli("export", model, "-o", folder / "out.onnx", "--exporter", exporter, *options)
        assert answer.code == 0, answer.text
        return Exported(folder / "out.onnx")

    return run


def rows(count: int, width: int = 4) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(count).standard_normal((count, width)).astype(np.float32))


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)


def test_zoo(export) -> None:
    from enginesmith.models.digits import digits

    exported = export("digits", exporter="auto")
    module, example = digits()
    for count in (1, 3):
        image = example["image"][:1].repeat(count, 1, 1, 1)
        same(exported(image=image)[0], module(image))


@pytest.mark.parametrize(
    ("model", "depth", "width"),
    [("net.py:build(2, width=5)", 2, 5), ("net:build(depth=2)", 2, 4), ("net.py:ready", 2, 4)],
)
def test_factory(export, model: str, depth: int, width: int) -> None:
    exported = export(model)
    assert exported.inputs == {"x": ["batch", width]}
    for count in (1, 3):
        same(exported(x=rows(count, width))[0], net(depth, width)(rows(count, width)))


def test_factory_in_a_package_of_the_current_folder(export, folder: Path) -> None:
    (folder / "project" / "nets").mkdir(parents=True)
    (folder / "project" / "__init__.py").touch()
    (folder / "project" / "nets" / "__init__.py").write_text("from .inner import build")
    (folder / "project" / "nets" / "inner.py").write_text(NET)
    same(export("project.nets:build(depth=2)")(x=rows(3))[0], net(2)(rows(3)))
    same(export("project/nets/inner.py:build")(x=rows(3))[0], net(1)(rows(3)))


def test_onnx_file(cli, export, folder: Path) -> None:
    export("net.py:build")
    answer = cli("simplify", "out.onnx", "-o", "clean.onnx")
    assert answer.code == 0, answer.text
    same(Exported(folder / "clean.onnx")(x=rows(3))[0], net()(rows(3)))


def test_export_archive(export, folder: Path) -> None:
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(net(2), (rows(2),), dynamic_shapes=({0: batch},)), folder / "net.pt2")
    exported = export("net.pt2", exporter="auto")
    assert exported.inputs == {"x": ["batch", 4]}
    same(exported(x=rows(5))[0], net(2)(rows(5)))


@pytest.mark.thorough
def test_an_export_archive_whose_inputs_have_the_same_length(export, folder: Path) -> None:
    class Masked(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (ids * mask).cumsum(1)

    sizes = {0: torch.export.Dim("b", max=64), 1: torch.export.Dim("s", max=64)}
    example = torch.randn(2, 8), torch.ones(2, 8)
    torch.export.save(torch.export.export(Masked(), example, dynamic_shapes=(sizes, sizes)), folder / "net.pt2")
    exported = export("net.pt2", exporter="auto")
    assert exported.inputs == {"ids": ["batch", "ids_dim_1"], "mask": ["batch", "ids_dim_1"]}
    ids, mask = rows(5), rows(5) > 0.5
    same(exported(ids=ids, mask=mask.float())[0], Masked()(ids, mask))


@pytest.mark.thorough
def test_hugging_face_folder(export, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    module = transformers.BertModel(config).eval()
    module.save_pretrained(folder / "bert")
    exported = export("hf:./bert", exporter="auto")
    assert exported.inputs == {
        name: ["batch", "sequence"] for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    assert exported.outputs == ["last_hidden_state", "pooler_output"]
    for count, length in ((1, 7), (3, 40)):
        ids = torch.randint(0, 50, (count, length), generator=torch.Generator().manual_seed(count))
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
        expected = module(**feeds)
        found = exported(**feeds)
        same(found[0], expected.last_hidden_state)
        same(found[1], expected.pooler_output)


@pytest.mark.thorough
def test_hugging_face_folders_of_other_kinds(export, cli, folder: Path) -> None:
    """A head without weights, a class that the library lacks, boxes of words, sound, text beside pictures."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = {"vocab_size": 50, "max_position_embeddings": 40}
    bert = transformers.BertConfig(**sizes, **text)
    transformers.BertModel(bert).save_pretrained(folder / "body")
    for name, words in (
        (
            "BertForSequenceClassification",
            "weights of BertForSequenceClassification: classifier.bias, classifier.weight",
        ),
        ("BertForNothing", "names the class BertForNothing, which transformers"),
    ):
        settings = json.loads((folder / "body" / "config.json").read_text()) | {"architectures": [name]}
        (folder / "body" / "config.json").write_text(json.dumps(settings))
        answer = cli("export", "hf:./body", "-o", "body.onnx")
        assert answer.code == 2
        assert words in answer.stderr
    layout = transformers.LayoutLMForTokenClassification(transformers.LayoutLMConfig(**sizes, **text)).eval()
    layout.save_pretrained(folder / "layout")
    exported = export("hf:./layout", exporter="auto")
    ids, corners = torch.randint(0, 50, (3, 7)), torch.randint(0, 500, (3, 7, 2))
    feeds = {"input_ids": ids, "bbox": torch.cat([corners, corners + 9], -1), "attention_mask": torch.ones_like(ids)}
    feeds["token_type_ids"] = torch.zeros_like(ids)
    same(exported(**feeds)[0], layout(**feeds).logits)
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    sound = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes, **convolutions, **positions, vocab_size=9))
    sound.eval().save_pretrained(folder / "sound")
    exported = export("hf:./sound", "--shape=time=400:1600:3200", exporter="auto")
    assert exported.inputs == {"input_values": ["batch", "time"]}
    waves = torch.randn(3, 900)
    same(exported(input_values=waves)[0], sound(waves).logits)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=16)
    config = transformers.CLIPConfig(
        text_config=transformers.CLIPTextConfig(**sizes, **text).to_dict(),
        vision_config=vision.to_dict(),
        projection_dim=8,
    )
    towers = transformers.CLIPModel(config).eval()
    towers.save_pretrained(folder / "towers")
    exported = export("hf:./towers", exporter="auto")
    feeds = {"input_ids": ids, "pixel_values": torch.randn(3, 3, 32, 32), "attention_mask": torch.ones_like(ids)}
    same(exported(**feeds)[exported.outputs.index("logits_per_image")], towers(**feeds).logits_per_image)


@pytest.mark.thorough
def test_hugging_face_models_that_judge_by_the_end_of_a_text(export, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sides = {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in SIDES.items()}
    config = transformers.BartConfig(**sides, vocab_size=50, d_model=16, max_position_embeddings=64, num_labels=3)
    bart = transformers.BartForSequenceClassification(config).eval()
    bart.save_pretrained(folder / "bart")
    exported = export("hf:./bart", exporter="auto")
    assert exported.inputs == {name: ["batch", "sequence"] for name in ("input_ids", "attention_mask")}
    for length in (7, 40):
        ids = torch.randint(3, 50, (3, length))
        ids[:, -1] = config.eos_token_id
        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        same(exported(**feeds)[exported.outputs.index("logits")], bart(**feeds).logits)


SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
MANY = """
import torch
from torch import nn

class Many(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight  # tied

    def forward(self, ids, scale, mask=None):
        hidden = self.table(ids) * scale[:, None, None] + mask[..., None]
        return {"logits": self.head(hidden), "best": self.head(hidden).argmax(-1), "more": (hidden, [hidden.mean(1)]),
                "name": "many", "nothing": None}

def build():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return Many(), {"ids": ids, "scale": torch.ones(2), "mask": torch.zeros(2, 3)}
"""


def test_inputs_and_outputs_of_all_kinds_and_tied_weights(export, cli, folder: Path) -> None:
    (folder / "many.py").write_text(MANY)
    inputs = ("ids:int64:batch,length", "scale:float32:batch", "mask:float32:batch,length")
    exported = export("many.py:build", *(f"--input={one}" for one in inputs))
    assert exported.inputs == {"ids": ["batch", "length"], "scale": ["batch"], "mask": ["batch", "length"]}
    assert exported.outputs == ["logits", "best", "more_0", "more_1_0"]
    found: dict[str, object] = {}
    exec(MANY, found)
    module = found["Many"]().eval()  # type: ignore[operator]
    for count, length in ((1, 5), (4, 2)):
        ids = torch.arange(count * length).reshape(count, length) % 11
        feeds = {"ids": ids, "scale": torch.arange(1.0, count + 1), "mask": torch.full((count, length), 0.5)}
        expected = module(**feeds)
        flat = (expected["logits"], expected["best"], expected["more"][0], expected["more"][1][0])
        for one, other in zip(exported(**feeds), flat, strict=True):
            same(one, other)
    answer = cli("export", "many.py:build", "-o", "again.onnx", "--exporter", "torchscript", "--json")
    notes = [note for entry in json.loads(answer.stdout)["history"] for note in entry["notes"]]
    assert any("name (str)" in note for note in notes)  # what is no tensor is left out, and said


OWN_PIPELINE = "def scale(x):\n    return x * 100\n"
OWN_MODELS = """
import torch
from torch import nn
from pipeline import scale

class Own(nn.Module):
    def forward(self, x):
        from models.late import shift  # only now
        return shift(scale(x))

def build():
    return Own(), torch.ones(2, 4)
"""


def test_packages_of_the_users_own_win_over_ours(export, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = folder / "project"
    for package in ("models", "pipeline", "calibration"):
        (project / package).mkdir(parents=True)
    (project / "models" / "__init__.py").write_text(OWN_MODELS)
    (project / "models" / "late.py").write_text("def shift(x):\n    return x + 7\n")
    (project / "pipeline" / "__init__.py").write_text(OWN_PIPELINE)
    (project / "cli.py").write_text("from models import build\n")
    same(export("project/cli.py:build")(x=rows(3))[0], rows(3) * 100 + 7)
    monkeypatch.chdir(Path(__file__).parents[2])  # our own folders of these names lie in the current folder
    same(export(f"{project}/models/__init__.py:build")(x=rows(3))[0], rows(3) * 100 + 7)
    monkeypatch.chdir(project)
    same(export("models:build")(x=rows(3))[0], rows(3) * 100 + 7)


WEIGHTED = """
from pathlib import Path
import torch
from safetensors.torch import load_file
from torch import nn
import part

def build():
    module = nn.Linear(4, 4, bias=False)
    module.load_state_dict(load_file(Path(__file__).parent / "weights.safetensors"))
    return nn.Sequential(module, part.Factor()), torch.ones(2, 4)
"""
PART = "from torch import nn\nclass Factor(nn.Module):\n    def forward(self, x):\n        return x * {}\n"


def test_a_change_of_weights_or_code_is_noticed(cli, folder: Path) -> None:
    from safetensors.torch import save_file

    def exported() -> tuple[torch.Tensor, str]:
        answer = cli("export", "weighted.py:build", "-o", "out.onnx", "--exporter", "torchscript")
        assert answer.code == 0, answer.text
        return Exported(folder / "out.onnx")(input=torch.ones(1, 4))[0], answer.stderr

    (folder / "weighted.py").write_text(WEIGHTED)
    (folder / "part.py").write_text(PART.format(2))
    save_file({"weight": torch.eye(4)}, folder / "weights.safetensors")
    first, log = exported()
    same(first, torch.full((1, 4), 2.0))
    assert "export: started" in log
    again, log = exported()
    same(again, first)
    assert "started" not in log
    assert "export: reused" in log

    (folder / "part.py").write_text(PART.format(3))
    same(exported()[0], torch.full((1, 4), 3.0))
    save_file({"weight": torch.eye(4) * 5}, folder / "weights.safetensors")
    same(exported()[0], torch.full((1, 4), 15.0))


@pytest.mark.thorough
def test_torch_load_reads_weights_and_refuses_objects(cli, export, folder: Path) -> None:
    user = "import torch, net\n\ndef build(only):\n    module, example = net.build()\n"
    user += "    module.load_state_dict(torch.load('net.pt', weights_only=only))\n    return module, example\n"
    (folder / "user.py").write_text(user)
    torch.save(net().state_dict(), folder / "net.pt")
    same(export("user.py:build(True)")(x=rows(3))[0], net()(rows(3)))
    answer = cli("export", "user.py:build(False)", "-o", "no.onnx")
    assert answer.code == 2
    assert "--allow-pickle" in answer.stderr
    assert not (folder / "no.onnx").exists()
