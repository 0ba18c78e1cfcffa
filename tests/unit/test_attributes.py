"""Attributes beside the tensors decide whether a module is the same one."""

import functools
import os
import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from enginesmith.pipeline.frameworks.torch.attributes import digest_attributes


class Net(nn.Module):
    """Holds one attribute, of any kind."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.value = value


class Options:
    """Holds a number."""

    def __init__(self, number: float) -> None:
        self.number = number


def make_function(number: float) -> Any:
    return lambda x: x + number


def shuffled(seed: int) -> list[int]:
    numbers = list(range(9))
    random.Random(seed).shuffle(numbers)
    return numbers


@pytest.mark.parametrize(
    "make",
    [
        *(lambda n: n, str, float, lambda n: [1, (2, {"a": n})], lambda n: {str(i) for i in shuffled(0)[: 5 + n]}),
        *(lambda n: torch.tensor([1.0, n]), lambda n: np.array([n, 2]), lambda n: np.array(["a", None, n], object)),
        *(Options, make_function, lambda n: functools.partial(max, n), lambda n: Options(n).__init__),
        *(lambda n: [nn.ReLU(), nn.GELU()][n], lambda n: nn.ReLU if n else nn.GELU, lambda n: Path(f"/a/{n}")),
        *(lambda n: re.compile("a" * (300 + n)), lambda n: np.random.default_rng(n), random.Random),
        *(lambda n: torch.Generator().manual_seed(n), lambda n: slice(n), lambda n: [torch.float32, torch.int8][n]),
    ],
)
def test_equal_attributes_have_a_digest_in_common_and_others_have_not(make: Any) -> None:
    first, again, other = (digest_attributes(Net(make(number))) for number in (0, 0, 1))
    assert first == again
    assert first.complete
    assert first.digest != other.digest


def test_weights_do_not_count_wherever_they_are_held() -> None:
    nets = [Net(None), Net(None)]
    for net in nets:
        net.value = [net.layer.weight, net]
        net.register_buffer("mean", torch.randn(3))
    assert digest_attributes(nets[0]) == digest_attributes(nets[1])
    nets[1].layer.register_parameter("bias", None)
    assert digest_attributes(nets[0]) != digest_attributes(nets[1])


@pytest.mark.parametrize("other", ["cuda", "cuda:1", torch.device("cuda:0")])
def test_devices_do_not_count_as_each_machine_has_its_own(other: object) -> None:
    assert digest_attributes(Net("cpu")) == digest_attributes(Net(other))
    assert digest_attributes(Net("cpu")) != digest_attributes(Net("cpus"))


def test_hashes_do_not_count_as_each_process_has_others() -> None:
    """The generation configuration of transformers holds one."""
    nets = [Net({"_original_object_hash": number}) for number in (1, 2)]
    assert digest_attributes(nets[0]) == digest_attributes(nets[1])


def _digest_with(monkeypatch: pytest.MonkeyPatch, make: Any, **variables: str) -> str:
    with monkeypatch.context() as changed:
        for name, value in variables.items():
            changed.setenv(name, value)
        return digest_attributes(Net(None), {"net": {"ENV": make()}}).digest


@pytest.mark.parametrize("make", [os.environ.copy, lambda: {**os.environ, "LC_ALL": "C"}, lambda: [dict(os.environ)]])
def test_variables_of_the_session_do_not_count_in_copies_of_the_environment_and_others_do(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PWD", "SHLVL", "SSH_TTY", "FAST"):
        monkeypatch.delenv(name, raising=False)
    before = _digest_with(monkeypatch, make)
    assert before == _digest_with(monkeypatch, make, PWD="/tmp", SHLVL="3", SSH_TTY="/dev/pts/3")
    assert before != _digest_with(monkeypatch, make, FAST="1")


@pytest.mark.parametrize("others", [{}, dict(os.environ)])
def test_variables_of_the_session_count_where_code_chose_them(
    others: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        _digest_with(monkeypatch, functools.partial(dict, others, SHLVL=level)) for level in ("7001", "7002")
    )
    assert first != second


def test_the_order_of_a_copy_of_the_environment_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHLVL", "1")
    backwards = dict(reversed(os.environ.copy().items()))
    assert _digest_with(monkeypatch, os.environ.copy) == _digest_with(monkeypatch, lambda: backwards)


def test_a_name_counts_that_a_small_table_has_in_common_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _digest_with(monkeypatch, lambda: {"COLUMNS": "80"}, COLUMNS="80") != _digest_with(monkeypatch, dict)


def test_hooks_count_and_their_numbers_do_not() -> None:
    nets = [Net(None) for _ in range(3)]
    for net in nets[:2]:
        net.layer.register_forward_hook(print)
        nets[2].register_forward_hook(print)
    digests = [digest_attributes(net).digest for net in nets]
    assert digests[0] == digests[1] != digests[2]


def test_recurrent_layers_are_known_as_a_whole() -> None:
    assert digest_attributes(nn.LSTM(2, 2)) == digest_attributes(nn.LSTM(2, 2))
    assert digest_attributes(nn.LSTM(2, 2)).complete


def test_objects_of_which_only_the_class_is_known_are_told() -> None:
    class Odd(dict[str, int]):
        def items(self) -> Any:
            raise KeyError

    for value in (threading.Lock(), Odd(), iter([1])):
        found = digest_attributes(Net(value))
        assert not found.complete
        assert found == digest_attributes(Net(value))


def test_objects_in_objects_come_to_an_end() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert digest_attributes(Net(ring)).complete
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    assert not digest_attributes(Net(deep)).complete
