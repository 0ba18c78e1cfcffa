"""Texts with a tokenizer: which lines, which tokenizer, which lengths, and what is refused."""

import json

import numpy as np
import pytest

from enginesmith.calibration.dataset import DataOptions, open_dataset
from enginesmith.calibration.options import PARTS, PartOptions
from enginesmith.pipeline.errors import DataError, MissingCapability
from enginesmith.pipeline.tensors import TensorSpec

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "one", "two", "three", "four"]
UNKNOWN, PAD, CLS, SEP, ONE, TWO, THREE, FOUR = range(8)
IDS = (TensorSpec.parse("input_ids:int64:batch,sequence"),)
ALL = tuple(
    TensorSpec.parse(f"{name}:int64:batch,sequence") for name in ("input_ids", "attention_mask", "token_type_ids")
)


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return made


@pytest.fixture
def write(tmp_path):
    """Writes lines beside a tokenizer and returns the file's name."""
    tokenizer().save(str(tmp_path / "tokenizer.json"))

    def write(*lines):
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        (tmp_path / "texts.jsonl").write_text(text, encoding="utf-8")
        return str(tmp_path / "texts.jsonl")

    return write


class TestTokens:
    def test_padded_to_the_longest(self, write):
        data = open_dataset(write({"text": "one"}, "", {"text": "two three four"}), ALL)
        assert (data.name, len(data), data.labels) == ("texts.jsonl", 2, None)
        assert data.arrays["input_ids"].tolist() == [[CLS, ONE, SEP, PAD, PAD], [CLS, TWO, THREE, FOUR, SEP]]
        assert data.arrays["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
        assert data.arrays["token_type_ids"].sum() == 0
        assert data.notes[0].startswith("texts as 5 tokens each (the longest), by ")

    @pytest.mark.parametrize("keys", [("text", "text_pair"), ("sentence1", "sentence2")])
    def test_pairs(self, write, keys):
        data = open_dataset(write(dict(zip(keys, ("one two", "three"), strict=True))), ALL)
        assert data.arrays["input_ids"].tolist() == [[CLS, ONE, TWO, SEP, THREE, SEP]]
        assert data.arrays["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]

    def test_only_what_the_model_takes_in_its_order_and_dtype(self, write):
        specs = tuple(TensorSpec.parse(f"{name}:int32:batch,sequence") for name in ("attention_mask", "input_ids"))
        data = open_dataset(write({"text": "one"}), specs)
        assert [(name, str(array.dtype)) for name, array in data.arrays.items()] == [
            ("attention_mask", "int32"),
            ("input_ids", "int32"),
        ]

    def test_the_models_own_length_cuts_and_pads(self, write):
        spec = (TensorSpec.parse("input_ids:int64:batch,4"),)
        data = open_dataset(write({"text": "one"}, {"text": "one two three four"}), spec)
        assert data.arrays["input_ids"].tolist() == [[CLS, ONE, SEP, PAD], [CLS, ONE, TWO, SEP]]
        assert "(the model's length)" in data.notes[0]
        assert data.notes[1] == "1 of 2 texts are longer and were cut off"

    def test_in_parts(self, write):
        path = write(*({"text": f"one {index}", "label": index % 3} for index in range(30)))
        opened = [open_dataset(path, IDS, options=PartOptions(part=part)) for part in PARTS]
        assert [len(data) for data in opened] == [10, 10, 10]
        assert sorted(row for data in opened for row in data.rows) == list(range(30))
        assert [data.labels.tolist() for data in opened] == [[row % 3 for row in data.rows] for data in opened]

    def test_max_length(self, write):
        data = open_dataset(write({"text": "one"}), IDS, options=DataOptions(max_length=6))
        assert data.arrays["input_ids"].shape == (1, 6)
        with pytest.raises(DataError, match="max_length is 6, and the model takes input_ids:int64:batch,4"):
            open_dataset(
                write({"text": "one"}),
                (TensorSpec.parse("input_ids:int64:batch,4"),),
                options=DataOptions(max_length=6),
            )

    def test_the_longest_is_no_longer_than_the_tokenizers_limit(self, write, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 4}')
        data = open_dataset(write({"text": "one two three four"}), IDS)
        assert data.arrays["input_ids"].tolist() == [[CLS, ONE, TWO, SEP]]
        (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
        assert open_dataset(write({"text": "one two three four"}), IDS).arrays["input_ids"].shape == (1, 6)

    def test_padding_is_as_the_tokenizer_says(self, write, tmp_path):
        lines = {"text": "one"}, {"text": "one two"}
        (tmp_path / "tokenizer_config.json").write_text('{"padding_side": "left", "pad_token": {"content": "four"}}')
        assert open_dataset(write(*lines), IDS).arrays["input_ids"].tolist()[0] == [FOUR, CLS, ONE, SEP]
        right = open_dataset(write(*lines), IDS, options=DataOptions(padding="right"))
        assert right.arrays["input_ids"].tolist()[0] == [CLS, ONE, SEP, FOUR]

    def test_no_room_beside_the_special_tokens(self, write):
        with pytest.raises(DataError, match="2 tokens a row have no room beside 2 special ones"):
            open_dataset(write({"text": "one"}), IDS, options=DataOptions(max_length=2))


class TestTokenizer:
    @pytest.mark.parametrize("place", ["elsewhere", "elsewhere/tokenizer.json"])
    def test_given(self, tmp_path, write, place):
        reference = write({"text": "one"})
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "tokenizer.json").rename(tmp_path / "elsewhere" / "tokenizer.json")
        with pytest.raises(DataError, match="no tokenizer beside"):
            open_dataset(reference, IDS)
        data = open_dataset(reference, IDS, options=DataOptions(tokenizer=str(tmp_path / place)))
        assert data.arrays["input_ids"].tolist() == [[CLS, ONE, SEP]]
        assert "by elsewhere" in data.notes[0]

    def test_in_a_folder_beside_the_texts(self, tmp_path, write):
        reference = write({"text": "one"})
        (tmp_path / "tokenizer").mkdir()
        (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer" / "tokenizer.json")
        assert open_dataset(reference, IDS).arrays["input_ids"].tolist() == [[CLS, ONE, SEP]]

    @pytest.mark.thorough
    def test_a_vocabulary_alone(self, tmp_path, write):
        pytest.importorskip("transformers")
        reference = write({"text": "one two"})
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
        assert open_dataset(reference, IDS).arrays["input_ids"].tolist() == [[CLS, ONE, TWO, SEP]]

    def test_that_is_not_there(self, write):
        with pytest.raises(DataError, match="there is no tokenizer nowhere"):
            open_dataset(write({"text": "one"}), IDS, options=DataOptions(tokenizer="nowhere"))

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_damaged(self, write, tmp_path, name):
        reference = write({"text": "one"})
        (tmp_path / name).write_text("{")
        with pytest.raises(DataError, match=rf"cannot read .*{name}"):
            open_dataset(reference, IDS)

    def test_without_the_package(self, write, monkeypatch):
        reference = write({"text": "one"})
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingCapability) as caught:
            open_dataset(reference, IDS)
        assert caught.value.remedy.startswith("pip install 'transformers>=")


class TestLines:
    @pytest.mark.parametrize(
        ("labels", "expected", "dtype"),
        [
            ([1, 0], [1, 0], np.int64),
            ([True, False], [1, 0], np.int64),
            ([0.5, 1], [0.5, 1.0], np.float64),
            (["no", "maybe"], [1, 0], np.int64),
            (["10", "2"], [10, 2], np.int64),
            (["-1", "+1"], [-1, 1], np.int64),
            (["10.5", "2", "-.5e1"], [10.5, 2.0, -5.0], np.float64),
            (["no", "1.5"], [1, 0], np.int64),
        ],
    )
    def test_labels(self, write, labels, expected, dtype):
        data = open_dataset(write(*({"text": "one", "label": label} for label in labels)), IDS)
        assert (data.labels.tolist(), data.labels.dtype) == (expected, dtype)
        notes = data.number_words(()).notes
        assert any(note.startswith("labels are numbered in alphabetical order: ") for note in notes) == ("no" in labels)

    def test_fields_of_other_names(self, write):
        options = DataOptions(text_field="review", labels="stars")
        data = open_dataset(write({"review": "one", "stars": 4, "label": "x"}), IDS, options=options)
        assert data.labels.tolist() == [4]

    @pytest.mark.parametrize(
        ("second", "said"),
        [
            ("{", r"texts\.jsonl, line 3 is no JSON"),
            (b"\xff".decode("latin-1"), "line 3 is no JSON"),
            ("[]", "line 3 is a JSON list, expected an object"),
            ({"texts": "one"}, "line 3 has the keys 'texts', and no 'text'"),
            ({"text": 3}, "line 3: 'text' is no text"),
            ({"text": "one"}, "line 3: the label is not there, and the first one is a number"),
            ({"text": "one", "label": "good"}, "line 3: the label is a word, and the first one is a number"),
            (
                {"text": "one", "label": [1, 0]},
                r"line 3: the label is \[1, 0\], expected a number or a word\n.*one class",
            ),
        ],
    )
    def test_refused(self, write, second, said):
        with pytest.raises(DataError, match=said) as caught:
            open_dataset(write({"text": "one", "label": 1}, "", second), IDS)
        assert caught.value.remedy

    def test_a_key_of_labels_that_no_line_has_is_refused_with_the_keys_of_the_lines(self, write):
        reference, options = write({"text": "one", "label": 1}, {"text": "two", "kind": 0}), DataOptions(labels="klass")
        expected = r"no labels 'klass'; the keys of its lines are 'text', 'label', 'kind'\n.*with --labels, or omit it"
        with pytest.raises(DataError, match=expected):
            open_dataset(reference, IDS, split="test", options=options)
        assert open_dataset(reference, IDS, options=options).labels is None  # calibration needs none

    def test_bytes_that_are_no_text(self, write, tmp_path):
        reference = write({"text": "one"})
        (tmp_path / "texts.jsonl").write_bytes(b'{"text": "\xff"}\n')
        with pytest.raises(DataError, match="line 1 is no JSON"):
            open_dataset(reference, IDS)

    @pytest.mark.parametrize(
        "spec",
        ["x:int64:batch,sequence", "input_ids:float32:batch,4", "input_ids:int64:4", "attention_mask:int64:batch,4"],
    )
    def test_inputs_that_are_no_tokens(self, write, spec):
        with pytest.raises(DataError, match=f"the model takes {spec}, and texts are made into input_ids"):
            open_dataset(write({"text": "one"}), (TensorSpec.parse(spec),))
