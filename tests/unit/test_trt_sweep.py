"""Workspace limits, and the largest batch that fits: searches, against builders that are known."""

import random
from collections.abc import Callable

import pytest

from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.tensorrt import builder
from enginesmith.pipeline.engines.tensorrt.versions import Capabilities, capabilities
from enginesmith.pipeline.errors import LimitTooSmall, ModelError
from enginesmith.pipeline.workflows.fit import largest

GATE = capabilities("tensorrt_rtx", "1.7.1")
TIMED = capabilities("tensorrt", "11.4.0")
KIB, MIB = 1 << 10, 1 << 20


class Builder:
    """Builds from some limit on, and remembers the limits it was given."""

    def __init__(self, need: int) -> None:
        self.need, self.limits = need, list[int]()

    def __call__(self, limit: int) -> None:
        self.limits.append(limit)
        if limit < self.need:
            raise LimitTooSmall(f"{limit}")


def facts(
    activation: int | None = 74 * MIB,
    weights: int | None = 51 * MIB,
    scratch: int | None = None,
    limit: int | None = None,
) -> EngineFacts:
    return EngineFacts(
        activation_bytes=activation, weights_bytes=weights, scratch_bytes=scratch, workspace_limit_bytes=limit
    )


def test_the_estimate_is_the_activations_beyond_the_weights() -> None:
    assert builder.estimate(facts(74 * MIB, 51 * MIB)) == 23 * MIB + 32 * KIB
    assert builder.estimate(facts(5 * MIB, 9 * MIB)) == 1
    assert builder.estimate(facts(9 * MIB, 9 * MIB)) == 1


@pytest.mark.parametrize("given", [facts(activation=None), facts(weights=None)])
def test_without_figures_there_is_nothing_to_sweep(given: EngineFacts) -> None:
    with pytest.raises(ModelError, match="no memory figures"):
        builder.estimate(given)


def test_points_lie_evenly_on_a_log_scale_up_to_the_activations() -> None:
    found = builder.points(facts(64 * MIB), 4 * MIB, 5)
    assert found == (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)


def test_a_tiny_smallest_limit_does_not_stretch_the_scale() -> None:
    first, second, *_, last = builder.points(facts(16 * MIB), 1, 5)
    assert (first, second, last) == (1, 2 * MIB, 16 * MIB)


@pytest.mark.parametrize("activation", [None, 0, 4 * MIB])
def test_points_are_in_order_where_there_is_no_room_above(activation: int | None) -> None:
    found = builder.points(facts(activation), 4 * MIB, 5)
    assert found[0] == 4 * MIB
    assert list(found) == sorted(found)
    assert builder.points(facts(activation), 4 * MIB, 1) == (4 * MIB,)


@pytest.mark.parametrize("short", [0, 7 * KIB, 16 * KIB])
def test_a_gate_is_found_with_one_build_where_the_estimate_holds(short: int) -> None:
    build = Builder(23 * MIB + short)
    assert builder.smallest(build, facts(), GATE) == 23 * MIB + 32 * KIB
    assert len(build.limits) == 1


def test_a_gate_of_one_byte_is_found_with_one_build() -> None:
    build = Builder(1)
    assert builder.smallest(build, facts(5 * MIB, 9 * MIB), GATE) == 1
    assert build.limits == [1]


@pytest.mark.parametrize("need", [24 * MIB, 60 * MIB, 300 * MIB])
def test_a_gate_is_searched_where_the_estimate_is_too_low(need: int) -> None:
    build = Builder(need)
    found = builder.smallest(build, facts(), GATE)
    assert need <= found <= need + 64 * KIB
    assert build.limits[-1] == found


@pytest.mark.parametrize("known", [GATE, TIMED], ids=["gate", "timed"])
@pytest.mark.parametrize("need", [24 * MIB, 60 * MIB, 99 * MIB, 100 * MIB])
def test_no_limit_above_one_that_is_known_to_be_enough_is_tried(known: Capabilities, need: int) -> None:
    build = Builder(need)
    found = builder.smallest(build, facts(scratch=23 * MIB, limit=100 * MIB), known)
    assert need <= found <= max(need + 64 * KIB, need / 0.95 + 1)
    assert max(build.limits) <= 100 * MIB
    assert build.limits[-1] == found


@pytest.mark.parametrize("seed", range(5))
def test_a_timed_flavour_is_searched_from_both_sides(seed: int) -> None:
    rng = random.Random(seed)
    need = rng.randrange(1, 4 << 30)
    build = Builder(need)
    found = builder.smallest(build, facts(scratch=rng.choice([None, 1, need // 7 + 1, need, 3 * need])), TIMED)
    assert need <= found <= max(need + 64 * KIB, need / 0.95 + 1)
    assert build.limits[-1] == found
    assert len(build.limits) < 60


def test_failures_of_another_kind_are_not_taken_for_a_limit() -> None:
    def build(limit: int) -> None:
        raise ModelError("the graph is broken")

    with pytest.raises(ModelError, match="broken"):
        builder.smallest(build, facts(), GATE)


def counted(need: Callable[[int], int]) -> tuple[Callable[[int], int], set[int]]:
    asked: set[int] = set()

    def ask(batch: int) -> int:
        assert batch >= 1
        asked.add(batch)
        return need(batch)

    return ask, asked


def test_the_largest_batch_is_the_one_that_trying_all_finds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        most = rng.choice([1, 2, 3, 17, 300])
        steps = [rng.choice([0, 0, 1, 5, rng.randrange(1000)]) for _ in range(most)]
        needs = [sum(steps[: index + 1]) for index in range(most)]
        limit = rng.randrange(-1, needs[-1] + 5)
        expected = max((index + 1 for index, need in enumerate(needs) if need <= limit), default=None)
        ask, asked = counted(lambda batch, needs=needs: needs[batch - 1])
        assert largest(ask, limit, most) == expected
        assert max(asked) <= most


@pytest.mark.parametrize("fits", [1, 2, 63, 4097, 65535, 65536])
def test_needs_that_grow_in_a_line_are_found_with_few_builds(fits: int) -> None:
    ask, asked = counted(lambda batch: 1000 + 77 * batch)
    assert largest(ask, 1000 + 77 * fits + 5) == fits
    assert len(asked) <= 6


def test_nothing_fits_where_batch_one_does_not() -> None:
    ask, asked = counted(lambda batch: 100 * batch)
    assert largest(ask, 99) is None
    assert asked == {1}


@pytest.mark.parametrize(
    "need",
    [lambda b: b * b, lambda b: 1000 + 4096 * -(-b * 1000 // 4096), lambda b: 10 * b if b <= 4 else 40 + 100 * (b - 4)],
    ids=["quadratic", "in pages", "bent"],
)
def test_needs_that_grow_unevenly_are_found_with_few_builds(need: Callable[[int], int]) -> None:
    ask, asked = counted(need)
    assert largest(ask, 10**6) == max(b for b in range(1, 1 << 16) if need(b) <= 10**6)
    assert len(asked) <= 20
