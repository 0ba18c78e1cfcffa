"""Hugging Face models: weights that no file holds, and example inputs. Folders: tests/integration/test_sources.py."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.frameworks.torch import factories, hugging_face, hugging_face_inputs, module, saved
from enginesmith.pipeline.frameworks.torch.module import LoadOptions, _infer_signature
from enginesmith.pipeline.tensors import TensorSpec

TEXT = {"vocab_size": 11, "max_position_embeddings": 8}
VISION = SimpleNamespace(image_size=6, num_channels=1)


class Model(nn.Module):
    """A body and a head; a table that only training uses."""

    main_input_name = "input_ids"

    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(**config)
        self.body, self.head, self.mask = nn.Embedding(11, 4), nn.Linear(4, 2), nn.Parameter(torch.zeros(4))

    def forward(
        self, input_ids: Tensor, bbox: Tensor | None = None, labels: Tensor | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        hidden = self.body(input_ids)
        return {"hidden": hidden, "logits": (self.head(hidden), [hidden])}


class Pictures(Model):
    main_input_name = "pixel_values"

    def forward(  # type: ignore[override]
        self, pixel_values: Tensor, pixel_mask: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        return {}


class Bare(Model):
    def forward(self, pixel_values, task_inputs, scale: float = 1.0, labels=None) -> None:  # type: ignore[no-untyped-def, override]
        pass


class Towers(Model):
    def forward(  # type: ignore[override]
        self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        return {}


class Sound(Model):
    main_input_name = "input_values"

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return {}


class Spectrogram(Model):
    main_input_name = "input_features"

    def forward(self, input_features: Tensor, decoder_input_ids: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return {}


class Captions(Model):
    main_input_name = "pixel_values"

    def forward(  # type: ignore[override]
        self, pixel_values: Tensor, input_ids: Tensor | None = None, decoder_input_ids: Tensor | None = None
    ) -> dict[str, Any]:
        return {}


class Patches(Model):
    main_input_name = "pixel_values"

    def forward(  # type: ignore[override]
        self,
        pixel_values: Tensor,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
    ) -> dict[str, Any]:
        return {}


class Heard(Model):
    def forward(  # type: ignore[override]
        self, input_ids: Tensor, input_features: Tensor | None = None, is_longer: Tensor | None = None
    ) -> dict[str, Any]:
        return {}


class Codes(Model):
    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return {}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Model(**TEXT), ["input_ids:int64:batch,sequence", "bbox:int64:batch,sequence,4"]),
        (Pictures(image_size=6, num_channels=1), ["pixel_values:float32:batch,1,6,6"]),
        (Pictures(image_size=6, num_channels=1, num_frames=4), ["pixel_values:float32:batch,4,1,6,6"]),
        (
            Towers(vision_config=VISION, **TEXT),
            [
                "input_ids:int64:batch,sequence",
                "attention_mask:int64:batch,sequence",
                "pixel_values:float32:batch,1,6,6",
            ],
        ),
        (
            Towers(vision_config=VISION, image_token_id=3, **TEXT),
            ["input_ids:int64:batch,sequence", "attention_mask:int64:batch,sequence"],
        ),
        (Sound(conv_stride=[5, 2]), ["input_values:float32:batch,time"]),
        (Sound(frequency_stride=1, num_mel_bins=5, max_length=7), ["input_values:float32:batch,7,5"]),
        (
            Spectrogram(num_mel_bins=5, max_source_positions=7, is_encoder_decoder=True, vocab_size=9),
            ["input_features:float32:batch,5,14", "decoder_input_ids:int64:batch,decoder_sequence"],
        ),
        (
            Pictures(encoder=VISION, decoder=SimpleNamespace()),
            ["pixel_values:float32:batch,1,6,6"],
        ),
        (
            Pictures(backbone_config=SimpleNamespace(num_channels=4, image_size=[6, 8])),
            ["pixel_values:float32:batch,4,6,8"],
        ),
        (
            Towers(image_size=6, **TEXT),
            [
                "input_ids:int64:batch,sequence",
                "attention_mask:int64:batch,sequence",
                "pixel_values:float32:batch,3,6,6",
            ],
        ),
        (
            Captions(vision_config=VISION, text_config=SimpleNamespace(), **TEXT),
            [
                "input_ids:int64:batch,sequence",
                "pixel_values:float32:batch,1,6,6",
                "decoder_input_ids:int64:batch,decoder_sequence",
            ],
        ),
        (
            Captions(vision_config=VISION, text_config=SimpleNamespace(), image_token_id=3, **TEXT),
            ["pixel_values:float32:batch,1,6,6"],
        ),
        (
            Patches(vision_config=SimpleNamespace(num_patches=16, patch_size=2)),
            [
                "pixel_values:float32:batch,16,12",
                "pixel_attention_mask:int64:batch,16",
                "spatial_shapes:int64:batch,2",
            ],
        ),
        (
            Heard(audio_config=SimpleNamespace(spec_size=8, num_mel_bins=2, enable_fusion=True), **TEXT),
            [
                "input_ids:int64:batch,sequence",
                "input_features:float32:batch,4,32,2",
                "is_longer:bool:batch,1",
            ],
        ),
        (Model(bbox_scale=100.0, **TEXT), ["input_ids:int64:batch,sequence", "bbox:float32:batch,sequence,4"]),
        (Codes(num_codebooks=2, is_encoder_decoder=True, **TEXT), []),
        (Sound(), []),
        (Model(), []),
    ],
)
def test_example_inputs_fit_the_kind_of_model(module: nn.Module, expected: list[str]) -> None:
    made = hugging_face_inputs.make_example(module)
    assert [str(spec) for _, spec in made.values()] == expected
    assert all(len(values.shape) == len(spec.shape) and len(values) == 2 for values, spec in made.values())


class Frames(Pictures):
    def forward(self, pixel_values: Tensor) -> dict[str, Any]:  # type: ignore[override]
        rows, _, _, _ = pixel_values.shape
        return {"y": pixel_values.reshape(rows // self.config.num_frames, self.config.num_frames, -1)}


def test_a_model_that_takes_the_pictures_of_videos_as_a_batch_gets_those_of_one() -> None:
    module = Frames(image_size=6, num_channels=1, num_frames=4)
    values, spec = hugging_face_inputs.make_example(module)["pixel_values"]
    assert str(spec) == "pixel_values:float32:4,1,6,6"
    assert module(values)["y"].shape == (1, 4, 36)


@pytest.mark.parametrize("length", [1, 7, 16, 32])
def test_made_up_texts_have_as_many_ends_in_each_row_wherever_they_are_cut(length: int) -> None:
    """A head that judges by the token that ends a text needs one, and as many in each row."""
    config = {**TEXT, "max_position_embeddings": 64}
    ids, _ = hugging_face_inputs.make_example(Model(**config, eos_token_id=10))["input_ids"]
    ends = (ids == 10)[:, :length].sum(1)
    assert ends.tolist() == [1 + (length >= 16)] * 2
    assert len(ids.unique()) > 5
    for other in (None, 11, [9, 10]):  # none, one that the vocabulary lacks, several
        drawn, _ = hugging_face_inputs.make_example(Model(**config, eos_token_id=other))["input_ids"]
        assert (drawn == 10).sum() < ids.numel() / 4


def test_a_head_that_judges_a_text_gives_it_to_the_decoder_itself() -> None:
    class Whole(Model):
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
            return {}

    class BartForSequenceClassification(Whole):
        pass

    config = {**TEXT, "is_encoder_decoder": True}
    assert list(hugging_face_inputs.make_example(Whole(**config))) == ["input_ids", "decoder_input_ids"]
    assert list(hugging_face_inputs.make_example(BartForSequenceClassification(**config))) == ["input_ids"]


@pytest.mark.parametrize(
    ("missing", "answers"),
    [(["head.weight", "head.bias"], "logits"), (["body.weight"], "hidden, logits"), (["mask"], "")],
)
def test_weights_that_no_file_holds_are_refused_where_an_answer_depends_on_them(
    missing: list[str], answers: str
) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example = {"input_ids": torch.arange(6).reshape(2, 3)}
    if answers:
        with pytest.raises(SourceError, match=rf"weights of Model: .*; they are drawn .* would be {answers}\n"):
            hugging_face.check_missing(model, example, missing)
    else:
        assert "no output depends" in hugging_face.check_missing(model, example, missing)[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hugging_face.check_missing(model, example, []) == []
    with pytest.raises(SourceError, match="would be the answers"):
        hugging_face.check_missing(model, {}, ["mask"])


def test_weights_are_put_back_where_the_model_fails_with_others() -> None:
    model, example = Model(), {"input_ids": torch.arange(6).reshape(2, 3)}

    def fail(module: Any, inputs: Any) -> None:
        if module.mask.any():
            raise ValueError("the mask is not 0")

    model.register_forward_pre_hook(fail)
    with pytest.raises(SourceError, match="would be the answers"):
        hugging_face.check_missing(model, example, ["mask"])
    assert not model.mask.any()


def test_all_tensors_may_be_named_and_those_that_are_made_from_others_are_not_offered() -> None:
    assert list(hugging_face_inputs.list_inputs(Model())) == ["input_ids", "bbox"]
    assert list(hugging_face_inputs.list_inputs(Pictures())) == ["pixel_values", "pixel_mask", "attention_mask"]
    assert list(hugging_face_inputs.list_usual_inputs(Pictures())) == ["pixel_values", "pixel_mask"]
    assert list(hugging_face_inputs.list_inputs(Bare())) == ["pixel_values", "task_inputs"]


class Texts(Model):
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Any]:
        assert input_ids is not None
        assert attention_mask is not None, "there is no mask"
        return {"logits": self.head(self.body(input_ids)) * attention_mask[..., None]}


IDS, MASK = "input_ids:int64:batch,sequence", "attention_mask:int64:batch,sequence"


@pytest.mark.parametrize(
    ("arrays", "chosen"),
    [
        (["input_ids:int64:9,5", "attention_mask:int64:9,5"], [IDS, MASK]),
        (["input_ids:int64:9,5"], [IDS]),
        (["attention_mask:int64:9,5"], [IDS, MASK]),
        (
            ["token_type_ids:int32:9,5", "input_ids:int64:9,5", "position_ids:uint8:9,7"],
            [IDS, "token_type_ids:int64:batch,sequence", "position_ids:int64:batch,7"],
        ),
        (["input_ids:int64:9,5", "attention_masks:int64:9,5"], [IDS, MASK]),
        (["input_ids:int64:9,5", "labels:int64:9"], [IDS, MASK]),
        (
            ["input_ids:int64:9,3,5", "attention_mask:int32:9,3,5", "token_type_ids:int64:9,3,5"],
            [f"{name}:int64:batch,3,sequence" for name in ("input_ids", "attention_mask", "token_type_ids")],
        ),
        (["input_ids:int64:9", "attention_mask:int64:9"], ["input_ids:int64:batch", "attention_mask:int64:batch"]),
        (["input_ids:int64:9,3,5", "attention_mask:int64:9,4,5"], [IDS, MASK]),  # with which the model does not run
    ],
)
def test_inputs_are_those_that_the_data_has_and_the_model_takes(arrays: list[str], chosen: list[str]) -> None:
    """The main one stays; and all do where something of the data is no input, as it may be misspelled."""
    inputs = hugging_face_inputs.choose_inputs(
        Texts(), list(map(TensorSpec.parse, (IDS, MASK))), list(map(TensorSpec.parse, arrays))
    )
    assert list(map(str, inputs)) == chosen


def test_what_the_data_adds_and_leaves_out_is_told() -> None:
    inputs = tuple(map(TensorSpec.parse, (IDS, MASK)))
    built = factories.Built(Texts(), inputs=inputs, usual=("input_ids", "attention_mask", "token_type_ids"))
    arrays = list(map(TensorSpec.parse, ("input_ids:int64:9,5", "token_type_ids:int64:9,5")))
    chosen = factories.choose_inputs(built, arrays)
    assert chosen.notes == (
        "token_type_ids:int64:batch,sequence is an input, as the data has it",
        "attention_mask is left out, so that its default holds: the data does not have it",
    )
    assert chosen.usual == ("input_ids", "token_type_ids")
    assert chosen.remedy.endswith("beside input_ids, token_type_ids, which the data has, it takes attention_mask")
    assert factories.choose_inputs(built, inputs) == built


@pytest.mark.parametrize("given", [False, True])
def test_a_model_is_run_on_the_inputs_of_the_data_unless_input_names_them(
    monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    specs = tuple(map(TensorSpec.parse, (IDS, MASK)))
    ids = torch.arange(6).reshape(2, 3)
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    takes = ("input_ids", "attention_mask", "token_type_ids")
    built = factories.Built(Texts(), example, specs, takes=takes)
    monkeypatch.setattr(factories, "build", lambda source: built)
    more = {**example, "token_type_ids": torch.zeros_like(ids)}

    def read(inputs: Any, choose: Any) -> Any:
        assert inputs == specs
        assert (choose is None) == given
        names = [spec.name for spec in (choose(list(map(TensorSpec.parse, arrays))) if choose else inputs)]
        return {name: more[name].numpy() for name in names}, ()

    options, arrays = LoadOptions(inputs=specs if given else ()), [f"{name}:int64:2,3" for name in more]
    loaded = module.load(Source(form="hf", target="", text="hf:m"), options, read)
    assert [spec.name for spec in loaded.signature.inputs] == list(takes)[: 2 if given else 3]
    arrays[1:] = []
    if not given:
        with pytest.raises(SourceError, match=r"there is no mask(.|\n)*beside input_ids, which the data has, it takes"):
            module.load(Source(form="hf", target="", text="hf:m"), options, read)


def test_an_input_is_no_target_of_training_because_of_its_name() -> None:
    class Points(Model):
        def forward(  # type: ignore[override]
            self,
            input_ids: Tensor,
            input_labels: Tensor | None = None,
            position_ids: Tensor | None = None,
            inputs_embeds: Tensor | None = None,
            question_positions: Tensor | None = None,
            mask_labels: list[Tensor] | None = None,
            end_positions: Tensor | None = None,
            encoder_outputs: tuple[Tensor] | None = None,
            cache=None,  # type: ignore[no-untyped-def]
            tokens=None,  # type: ignore[no-untyped-def]
        ) -> None:
            pass

    derived = ["position_ids", "inputs_embeds", "question_positions", "tokens"]
    assert list(hugging_face_inputs.list_inputs(Points())) == ["input_ids", "input_labels", *derived]
    assert list(hugging_face_inputs.list_usual_inputs(Points())) == ["input_ids", "input_labels"]


def test_a_text_of_no_limit_has_the_usual_length() -> None:
    ids, _ = hugging_face_inputs.make_example(Model(**TEXT | {"max_position_embeddings": -1}))["input_ids"]
    assert ids.shape == (2, 32)


@pytest.mark.parametrize("config", [{"image_size": "any"}, {"image_size": -6}, {}])
def test_no_example_is_made_of_a_configuration_of_another_form(config: dict[str, Any]) -> None:
    assert hugging_face_inputs.make_example(Pictures(num_channels=-1, **config)) == {}


@pytest.mark.parametrize("main", [["pixel_values", "task_inputs"], "pixel_values", "input_ids"])
def test_there_is_no_example_where_one_of_the_inputs_is_not_known(main: str | list[str]) -> None:
    module = Bare(image_size=6, num_channels=1)
    module.main_input_name = main  # type: ignore[assignment]
    assert hugging_face_inputs.make_example(module) == {}
    with pytest.raises(SourceError, match="for Bare, which takes pixel_values, task_inputs\n"):
        raise hugging_face_inputs.explain_unknown(module)


def test_an_input_that_is_not_the_main_one_of_its_family_is_known() -> None:
    class Tower(Model):
        def forward(self, pixel_values, mask: Tensor | None = None, **more: Any) -> None:  # type: ignore[no-untyped-def, override]
            pass

    assert list(hugging_face_inputs.make_example(Tower(image_size=6, num_channels=1))) == ["pixel_values"]


def test_a_model_that_cannot_be_called_is_refused_with_its_parts() -> None:
    class Speaker(Model):
        forward = nn.Module.forward  # type: ignore[assignment]

    hugging_face.check_callable(Model())
    with pytest.raises(SourceError, match="Speaker has no forward") as error:
        hugging_face.check_callable(Speaker())
    assert "one of its parts (body, head) with its inputs" in error.value.remedy


def test_a_model_that_chooses_a_text_reads_several_for_each_sample() -> None:
    class TinyForMultipleChoice(Texts):
        pass

    made = hugging_face_inputs.make_example(TinyForMultipleChoice(**TEXT))
    assert [str(spec) for _, spec in made.values()] == [
        "input_ids:int64:batch,choices,sequence",
        "attention_mask:int64:batch,choices,sequence",
    ]
    ids, mask = (values for values, _ in made.values())
    assert ids.shape == mask.shape == (2, 3, 8)
    assert all((ids[:, 0] != ids[:, at]).any() for at in (1, 2))


def test_a_model_of_two_texts_has_the_example_of_the_one_that_it_reads() -> None:
    class Ambiguous(SimpleNamespace):
        def get_text_config(self, *, decoder: bool | None = None, encoder: bool | None = None) -> Any:
            if decoder == encoder:
                raise ValueError("which of the two?")
            return SimpleNamespace(vocab_size=9 if decoder else 11, pad_token_id=1)

    class TextForSequenceClassification(Model):
        pass

    module = TextForSequenceClassification()
    module.config = Ambiguous()
    assert hugging_face_inputs.find_text_config(module.config).vocab_size == 11
    assert hugging_face_inputs.find_text_config(module.config, decodes=True).vocab_size == 9
    assert hugging_face.advise(module) == ""


def test_boxes_that_the_model_scales_are_shares_of_the_page() -> None:
    boxes, _ = hugging_face_inputs.make_example(Model(bbox_scale=100.0, **TEXT))["bbox"]
    assert boxes.min() >= 0
    assert boxes.max() <= 1
    assert (boxes[..., :2] < boxes[..., 2:]).all()


def test_a_classifier_of_texts_without_a_token_that_fills_them_is_told_to_name_one() -> None:
    class TextForSequenceClassification(Model):
        pass

    assert "set it in config.json" in hugging_face.advise(TextForSequenceClassification(pad_token_id=None))
    assert not hugging_face.advise(TextForSequenceClassification(pad_token_id=0))
    assert not hugging_face.advise(Model())


@pytest.mark.parametrize(
    ("tags", "noted"),
    [
        (["O", "B-LOC", "I-LOC", "B-PER", "I-PER"], False),
        (["O", "B-LOC", "B-PER", "I-LOC", "I-PER"], True),
        (["B-LOC", "I-LOC", "O"], True),
        (["O", "I-LOC", "B-LOC"], True),
        (["LABEL_0", "LABEL_1"], False),
        ([], False),
    ],
)
def test_tags_in_another_order_than_the_metric_of_entities_takes_are_noted(tags: list[str], noted: bool) -> None:
    notes = hugging_face.describe_tags(tags)
    assert len(notes) == noted
    assert all(note.startswith(f"its tags are {', '.join(tags)}, and --metric entity_f1 reads") for note in notes)


@pytest.mark.parametrize(("own", "remedy"), [(True, "is not run"), (False, "install a version")])
def test_a_class_that_the_library_lacks_is_named(own: bool, remedy: str) -> None:
    config = SimpleNamespace(architectures=["NewModel"], **({"auto_map": {}} if own else {}))
    library = SimpleNamespace(AutoConfig=SimpleNamespace(from_pretrained=lambda *_, **__: config), __version__="1")
    with pytest.raises(SourceError, match="names the class NewModel, which transformers 1 does not have") as error:
        hugging_face.load_model(library, "folder")
    assert remedy in error.value.remedy


@pytest.mark.parametrize(
    ("least", "fixed", "ran"),
    [(8, 8, [4, 8]), (4, "sequence", [4]), (16, "sequence", [4, 8])],
    ids=["half refused", "half taken", "all refused"],
)
def test_a_length_of_which_a_model_refuses_half_is_fixed(least: int, fixed: int | str, ran: list[int]) -> None:
    """One sample is tried: Nystromformer takes half of the length of two, which is as many numbers as one has."""
    lengths = list[int]()

    class Folded(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            lengths.append(input_ids.shape[1])
            return self.body(input_ids).view(-1, least, 4)  # type: ignore[no-any-return]

    module = Folded(**TEXT)
    example, notes = hugging_face_inputs.fix_lengths(module, hugging_face_inputs.make_example(module))
    assert [str(spec) for _, spec in example.values()] == [
        f"{name}:int64:batch,{fixed}" for name in ("input_ids", "attention_mask")
    ]
    words = "the model does not run with sequence = 4, so the dimension is fixed at 8"
    assert notes == ([words] if fixed == 8 else [])
    assert lengths == ran


def test_of_two_lengths_the_one_that_is_refused_is_fixed() -> None:
    class Decoding(Model):
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
            assert decoder_input_ids is not None
            return self.body(decoder_input_ids).view(-1, 8, 4)  # type: ignore[no-any-return]

    module = Decoding(is_encoder_decoder=True, max_target_positions=8, **TEXT)
    example, notes = hugging_face_inputs.fix_lengths(module, hugging_face_inputs.make_example(module))
    shapes = {name: spec.shape for name, (_, spec) in example.items()}
    assert shapes == {"input_ids": ("batch", "sequence"), "decoder_input_ids": ("batch", 8)}
    assert notes == ["the model does not run with decoder_sequence = 4, so the dimension is fixed at 8"]


@pytest.mark.parametrize("fields", [{"dropout": 0.1, "noise_scale": 0.5, "layers": 2, "dropout_b": 0.0}, {"layers": 2}])
def test_a_model_that_answers_at_random_is_told_which_fields_to_set_to_zero(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, float]
) -> None:
    """Its length is fixed, too, where it refuses half of it."""

    class Random(Model):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            hidden = self.body(input_ids).view(-1, 8, 4)
            return hidden + torch.rand_like(hidden)  # type: ignore[no-any-return]

    module = Random(**fields, **TEXT)
    monkeypatch.setattr(factories, "_library", lambda *_: None)
    monkeypatch.setattr(hugging_face, "load_model", lambda *_: (module, [], ["loaded"]))
    built = factories._hf(Source(form="hf", target="folder", text="hf:./folder"))
    assert built.inputs[0].shape == ("batch", "sequence"), "the model is not run, as for those that are stored"
    built = factories.fix_lengths(built)
    assert [str(spec) for spec in built.inputs] == ["input_ids:int64:batch,8"]
    assert built.notes == ("loaded", "the model does not run with sequence = 4, so the dimension is fixed at 8")
    with pytest.raises(SourceError, match="answers differently") as error:
        _infer_signature(Source(form="hf", target="folder", text="hf:./folder"), LoadOptions(), built)
    own = "set what is random to 0.0 in its config.json: noise_scale, dropout; or"
    assert error.value.remedy.startswith(own if len(fields) > 1 else "take out what is random (sampling")


def test_a_model_that_other_sizes_change_is_refused_with_the_sizes_to_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Switching(Texts):
        factor = 1

        def forward(self, input_ids: Tensor) -> dict[str, Any]:  # type: ignore[override]
            self.factor = 2 if input_ids.shape[1] < 6 else self.factor
            return {"logits": self.factor * self.head(self.body(input_ids))}

    class Other(Texts):
        def forward(self, input_ids: Tensor) -> dict[str, Any]:  # type: ignore[override]
            return {"logits": self.head(self.body(input_ids)) + self.noise}

    def build(kind: type[Texts]) -> factories.Built:
        built = kind(**TEXT)
        built.noise = next(noises)
        example = {"input_ids": torch.arange(16).reshape(2, 8) % 11}
        return factories.Built(built.eval(), example, (TensorSpec.parse(IDS),), takes=("input_ids",))

    source, options, noises = Source(form="hf", target="m", text="hf:m"), LoadOptions(), itertools.count()
    for kind, reason in ((Switching, "changes itself when"), (Other, "builds another model each")):
        monkeypatch.setattr(factories, "build", lambda source, kind=kind: build(kind))
        loaded = module.load(source, options)
        (folder := tmp_path / kind.__name__).mkdir()
        with pytest.raises(SourceError, match=reason) as caught:
            saved.save(loaded, source, options, folder)
        assert caught.value.remedy.endswith("--input input_ids:int64:batch,8") == (kind is Switching)
