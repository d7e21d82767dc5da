"""Verdicts of the GPU plan's rows, one line for each decision: is a prompt faster from a tier than computed, and what does
saving cost? Lines whose rows are not there are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_PLACES = (("ttft-memory", "memory"), ("ttft-disk", "disk"))


def verdicts(results: Sequence[dict[str, Any]]) -> list[str]:
    """The lines."""
    steps = {result["step"]: [one for one in result["rows"] if "measured" in one] for result in results}
    lines = [*_ttft(steps)]
    for step in ("saving-few", "saving-many"):
        lines += [*_saving(steps.get(step, [])), *_reuse(steps.get(step, []), steps)]
    failed = [result["step"] for result in results if result["error"]]
    if failed:
        lines.append(f"Not shown, since steps failed or were not run: {', '.join(failed)}.")
    return lines


def _ttft(steps: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    rival = {one["what"]: one["measured"] for one in steps.get("ttft-copies", ())}
    for step, place in _PLACES:
        rows = [one for one in steps.get(step, ()) if "length" in one["measured"] and "computed" in one["measured"]]
        pays: dict[str, list[int]] = {}
        for one in sorted(rows, key=lambda one: one["measured"]["length"]):
            found, length = one["measured"], int(one["measured"]["length"])
            name, where, how = one["what"].split(", ", 2)
            seconds, computed = found["p50"], found["computed"]
            word = "faster" if seconds < computed else "SLOWER"
            line = f"{name} {where}, {how}: {_ms(seconds)} (p99 {_ms(found['p99'])}), computing {_ms(computed)}: {word}"
            if found["loaded"] < 0.95:
                line += f", but {found['loaded']:.0%} of the blocks were loaded"
            theirs = rival.get(f"{name}, vLLM's way of copying, {how}") if place == "memory" else None
            if theirs:
                line += f"; vLLM's way of copying {_ms(theirs['p50'])}"
            yield line + "."
            pays.setdefault(how, [])
            if seconds < computed:
                pays[how].append(length)
        for how, lengths in pays.items():
            least = f"for prompts from {min(lengths):,} tokens on" if lengths else "for no length that was tried"
            yield f"Decision, {place}, {how}: it saves time {least}."


def _saving(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    named = {one["what"].partition(", ")[2]: one["measured"] for one in rows}
    alone = named.get("saving nothing")
    if alone is None:
        return
    count = f"{alone['count']:.0f} at once"
    for name, words in (
        ("+ memory tier", "saving to memory"),
        ("+ disk tier", "saving to memory and disk"),
        ("vLLM's way of copying, no checks", "saving by vLLM's way of copying"),
    ):
        one = named.get(name)
        if one is not None and "share" in one:
            dropped = f", {one['dropped']:.1%} of the blocks dropped" if one.get("dropped") else ""
            yield (
                f"{count}, {words}: {one['share']:.1%} of the throughput, ITL p99 {_ms(one['p99'])} beside "
                f"{_ms(alone['p99'])}{dropped}."
            )
    added = [(name, one["more"]) for name, one in named.items() if name.startswith("+") and "more" in one]
    if len(added) > 2:
        before, costs = 0.0, []
        for name, more in added:
            costs.append(f"{name.removeprefix('+ ')} {(more - before) * 1e3:+.0f} ms")
            before = more
        yield f"{count}, what saving adds, part after part: {'; '.join(costs)}; together {before * 1e3:+.0f} ms."


def _reuse(rows: Sequence[dict[str, Any]], steps: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """How much of what is saved must be loaded once, so that saving costs no more time than loading saves."""
    saving = {one["what"].partition(", ")[2]: one["measured"] for one in rows}
    for (step, _), name in zip(_PLACES, ("+ memory tier", "+ disk tier"), strict=True):
        loads = [one for one in steps.get(step, ()) if "length" in one["measured"] and "computed" in one["measured"]]
        busy = next((one for one in loads if not one["what"].endswith("idle")), None)
        cost = saving.get(name)
        if busy is None or cost is None or "more" not in cost:
            continue
        found = busy["measured"]
        gained = (found["computed"] - found["p50"]) / found["length"]
        spent = max(cost["more"], 0.0) / cost["tokens"]
        what = f"{cost['count']:.0f} at once, {name.removeprefix('+ ')}"
        if gained <= 0:
            yield f"Decision, {what}: saving does not pay, since loading ({busy['what']}) saves no time."
        elif not spent:
            yield f"Decision, {what}: saving costs no time that could be measured."
        elif spent > gained:
            yield f"Decision, {what}: saving does not pay, unless a token is loaded {spent / gained:.1f} times."
        else:
            yield f"Decision, {what}: saving pays if {spent / gained:.1%} of the saved tokens are loaded once ({busy['what']})."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
