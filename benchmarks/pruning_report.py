"""Write the results of benchmarks/pruning.py as text."""

from collections.abc import Iterator, Mapping
from typing import Any


def markdown(found: Mapping[str, Any]) -> str:
    """The tables of a results file."""
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    text = ["# Pruning", "", f"{found['machine']}; {versions}. By `python benchmarks/pruning.py`."]
    parts = (("digits", _digits), ("resnet50", _resnet50), ("by_hand", _by_hand))
    for name, lines in parts:
        if found.get(name):
            text += ["", *lines(found[name])]
    return "\n".join(text) + "\n"


def of_resnet50(row: Mapping[str, Any]) -> str:
    """One setting, for the terminal."""
    return f"resnet50, {row['setting']}: {_over_dense(row['timed'])}"


def of_by_hand(row: Mapping[str, Any]) -> str:
    """One comparison, for the terminal."""
    if "refused" in row:
        return f"{row['model']}, {row['scope']}: {row['refused']}"
    return f"{row['model']}, {row['scope']}: ours × by hand {_ratio(row['over_by_hand'])}, top-1 {row.get('top1')}"


def _digits(row: Mapping[str, Any]) -> Iterator[str]:
    yield "## A: digits, half of the MACs, trained back"
    yield ""
    if "variants" not in row:
        yield f"Refused: {row['refusal']}."
        return
    yield "| | top-1, embedded test data | lost | × dense, timed by the product | × dense, timed here |"
    yield "| --- | --- | --- | --- | --- |"
    for name, one in row["variants"].items():
        quality = one["quality"] or {"value": float("nan"), "drop": float("nan")}
        mine = row["timed"]["over_dense"].get("pruned fp32") if one["speedup_over_dense"] else None
        times = f"{_ratio(one['speedup_over_dense'])} | {_ratio(mine)}"
        yield f"| {name} | {quality['value']:.4f} | {quality['drop']:+.4f} | {times} |"
    yield ""
    if row["pruning"]:
        yield f"{_gone(row['pruning'])}."
    if row["recovery"]:
        back = row["recovery"]
        yield (
            f"On {back['held_back']} samples held back, {back['metric']} {back['before']:.4f} before recovery and "
            f"{back['after']:.4f} after {back['steps']} steps (dense {back['teacher']:.4f}); the step took "
            f"{row['recover_seconds']:.0f} s, the command {row['seconds']:.0f} s."
        )
    yield f"Winner: {row['winner']}. {_rejected(row)}"


def _resnet50(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "## B: resnet50, half of the MACs"
    yield ""
    yield "Random weights, calibration made up: about speed alone. × the dense sibling of the same precision, paired."
    yield ""
    yield "| setting | MACs left | parameters left | fp32 × dense | int8 × dense | p50 ms: dense, pruned; in int8 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if "timed" not in row:
            yield f"| {row['setting']} | – | – | – | – | {row['refusal']} |"
            continue
        facts, timed = row["pruning"], row["timed"]
        left = [_left(facts, what) for what in ("macs", "parameters")]
        ratios = [_ratio(timed["over_dense"].get(f"pruned {each}")) for each in ("fp32", "int8")]
        names = ("dense fp32", "pruned fp32", "dense int8", "pruned int8")
        times = [f"{timed['p50_ms'][name]:.1f}" if name in timed["p50_ms"] else "–" for name in names]
        yield f"| {row['setting']} | {' | '.join(left + ratios)} | {', '.join(times[:2])}; {', '.join(times[2:])} |"


def _by_hand(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "## C: torch-pruning by hand"
    yield ""
    yield f"By hand: {rows[0]['ratio']:g} of the channels, as in the README. The product is asked for as many MACs."
    yield ""
    yield "| model | ranked | MACs left: by hand, ours | p50 ms: dense, by hand, ours | ours × by hand |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        head = f"| {row['model']} | {row['scope']} |"
        if "refused" in row:
            why = "; ".join(f"{who}: {text.splitlines()[0][:160]}" for who, text in row["refused"].items())
            yield f"{head} – | – | {why} |"
            continue
        left = ", ".join(f"{row['macs_left'][name]:.1%}" for name in ("by hand", "ours"))
        times = ", ".join(f"{row['p50_ms'][name]:.3g}" for name in ("dense", "by hand", "ours"))
        yield f"{head} {left} | {times} | {_ratio(row['over_by_hand'])} |"
    yield from _top1(rows)
    yield from _lines(rows)


def _top1(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    judged = [row for row in rows if "top1" in row]
    if not judged:
        return
    yield ""
    limit = f"{judged[0]['recover_limit_seconds']:g} s"
    yield f"Top-1 of digits' embedded test data; both trained back by `Recover`, {limit}:"
    yield ""
    yield "| ranked | dense | by hand | ours | by hand, recovered | ours, recovered | steps: by hand, ours |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in judged:
        names = ("dense", "by hand", "ours", "by hand, recovered", "ours, recovered")
        values = " | ".join(f"{row['top1'][name]:.4f}" for name in names)
        yield f"| {row['scope']} | {values} | {row['top1']['by hand, steps']}, {row['top1']['ours, steps']} |"


def _lines(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    row = next((one for one in rows if "lines" in one), None)
    if row is None:
        return
    hand, ours = row["lines"]["by hand"], row["lines"]["ours"]
    yield ""
    yield f"What the user writes: {len(hand)} lines by hand, the model's loading and training apart, and {len(ours)}:"
    yield ""
    yield from ("```python", *hand, "```", "", "```", *ours, "```")


def _gone(facts: Mapping[str, Any]) -> str:
    parts = [f"{1 - facts[f'{what}_after'] / facts[f'{what}_before']:.1%} of {name}" for what, name in _COUNTED]
    return f"Gone: {', '.join(parts)}"


_COUNTED = (("macs", "MACs"), ("parameters", "parameters"), ("channels", "channels"))


def _left(facts: Mapping[str, Any] | None, what: str) -> str:
    return f"{facts[f'{what}_after'] / facts[f'{what}_before']:.1%}" if facts else "–"


def _rejected(row: Mapping[str, Any]) -> str:
    return " ".join(f"{name}: {one['rejected']}." for name, one in row["variants"].items() if one["rejected"])


def _over_dense(timed: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_ratio(one)} × dense" for name, one in timed["over_dense"].items())


def _ratio(one: Mapping[str, float] | None) -> str:
    return f"{one['median']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" if one else "–"
