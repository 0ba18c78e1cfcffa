"""What benchmarks/precision.py found, as text."""

from collections.abc import Iterator
from typing import Any

_EVALUATION, _JUDGEMENT = "evaluation", "judgement"
_KINDS = ("calibrate", "sensitivity", "search", "precision")


def lines(row: dict[str, Any]) -> list[str]:
    """A network, for the terminal."""
    found = [f"{row['net']}: {row['metric']}, eager {row['eager_ms']:.2f} ms"]
    for name, graph in row["graphs"].items():
        drops = "  ".join(f"{part} {graph[part]['value']:.4f} ({graph[part]['drop']:+.4f})" for part in _parts(graph))
        found.append(f"  {name:24}{drops}   {_ratio(graph['speedup'])}")
    found += [f"  {peer:24}{reason}" for peer, reason in row["refused"].items()]
    for duel in row["duels"]:
        names = f"{duel['ours']} against {duel['rival']}"
        found.append(f"  {names}: drop {duel['more_drop']:+.4f}, {_ratio(duel['speedup'])} the speed")
    return found


def markdown(found: dict[str, Any]) -> str:
    """The tables of a results file."""
    text = [
        "# int8 beside plain quantisation by others",
        "",
        f"{found['machine']}. By `python benchmarks/precision.py`.",
    ]
    if found.get("nets"):
        text += ["", *_nets(found["nets"])]
    if found.get("plain"):
        text += ["", *_plain(found["plain"])]
    if found.get("cost"):
        text += ["", *_cost(found["cost"])]
    return "\n".join(text) + "\n"


def _nets(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Trained networks"
    yield ""
    yield "Metric and drop against eager on data that nobody chose by (`judgement`), and on the data that the product"
    yield "chose by (`evaluation`); times faster than eager, one thread, batch 1, paired, with 95 % intervals."
    yield ""
    yield "| network | graph | metric | drop | drop on evaluation | × eager |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        for name, graph in row["graphs"].items():
            last = graph[_JUDGEMENT]
            yield (
                f"| {row['net']} | {name} | {last['value']:.4f} | {last['drop']:+.4f} | "
                f"{graph[_EVALUATION]['drop']:+.4f} | {_ratio(graph['speedup'])} |"
            )
        for peer, reason in row["refused"].items():
            yield f"| {row['net']} | {peer} | – | – | – | {reason.splitlines()[0][:120]} |"
    yield ""
    yield "Ours against each rival, paired by sample and by round (a positive drop: we lose more):"
    yield ""
    yield "| network | ours | rival | drop beyond theirs [95 %] | × their speed |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        for duel in row["duels"]:
            interval = f"[{duel['more_drop_low']:+.4f}, {duel['more_drop_high']:+.4f}]"
            yield (
                f"| {row['net']} | {duel['ours']} | {duel['rival']} | {duel['more_drop']:+.4f} {interval} | "
                f"{_ratio(duel['speedup'])} |"
            )
    yield ""
    yield from _verdict(rows)


def _verdict(rows: list[dict[str, Any]]) -> Iterator[str]:
    """In how many duels we lose no more and are no slower, and which those are where it is otherwise."""
    duels = [(row["net"], duel) for row in rows for duel in row["duels"]]
    worse = [each for each in duels if each[1]["more_drop"] > 0]
    slower = [each for each in duels if each[1]["speedup"]["median"] < 1]
    yield f"Of {len(duels)} duels we lose no more than the rival in {len(duels) - len(worse)}, and are no slower in"
    yield f"{len(duels) - len(slower)}. The others:"
    yield ""
    for net, duel in worse:
        proven = "beyond the noise" if duel["more_drop_low"] > 0 else "within the noise: the interval holds 0"
        yield f"- {net}, {duel['ours']} against {duel['rival']}: {duel['more_drop']:+.4f} more drop, {proven}"
    for net, duel in slower:
        proven = "beyond the noise" if duel["speedup"]["high"] < 1 else "within the noise: the interval holds 1"
        yield f"- {net}, {duel['ours']} against {duel['rival']}: {_ratio(duel['speedup'])} the speed, {proven}"


def _plain(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "## A plain script and the pipeline, in turns"
    yield ""
    yield "| model | graph | p50 ms | × eager | × the plain script |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        for name, graph in row["graphs"].items():
            over = _ratio(graph["over_plain"]) if graph["over_plain"] else "–"
            yield f"| {row['model']} | {name} | {graph['p50_ms']:.1f} | {_ratio(graph['speedup'])} | {over} |"


def _cost(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "## What calibration and quantisation take"
    yield ""
    yield "Seconds of each step (search: with sensitivity); peak memory of `calibrate` and of all, over that of an"
    yield "idle worker."
    yield ""
    yield "| model | samples | calibrate s | search s | precision s | MB calibrate | MB | × the model's bytes |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if row["refusal"]:
            yield f"| {row['model']} | {row['samples']} | {row['refusal']} | – | – | – | – | – |"
            continue
        seconds, extra = row["seconds"], row["extra_peak_bytes"]
        parts = {kind: sum(seconds[name] for name in seconds if name.startswith(kind)) for kind in _KINDS}
        yield (
            f"| {row['model']} | {row['samples']} | {parts['calibrate']:.1f} | "
            f"{parts['sensitivity'] + parts['search']:.1f} | {parts['precision']:.1f} | "
            f"{extra['calibrate'] / 1e6:.0f} | {max(extra.values()) / 1e6:.0f} | {row['peak_share']:.2f} |"
        )


def _parts(graph: dict[str, Any]) -> tuple[str, ...]:
    return tuple(part for part in (_EVALUATION, _JUDGEMENT) if part in graph)


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
