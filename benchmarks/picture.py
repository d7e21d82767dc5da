"""Draws the README's picture from the figures of `foreword demo --json-file FILE`.

    foreword demo --json-file demo.json && python -m benchmarks.picture demo.json docs/pictures/demo.svg

An SVG written by hand: three bars need no plotting library.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, ROW, LEFT, TOP, BAR = 720, 52, 150, 64, 26
COLORS = ("#9aa3ad", "#5b8fd6", "#1f6f43")


@dataclass(frozen=True)
class Bar:
    """A row of the picture: its name, how long it is, what stands behind it."""

    name: str
    value: float
    label: str
    color: str


def bars(title: str, subtitle: str, description: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars below each other, to one scale, as an SVG."""
    scale = (WIDTH - LEFT - 190) / max(row.value for row in rows)
    height = TOP + ROW * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img" '
        f'aria-label="{escape(description)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="17" font-weight="bold" fill="#222">{escape(title)}</text>',
        f'<text x="16" y="46" font-size="12" fill="#555">{escape(subtitle)}</text>',
    ]
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        length = max(row.value * scale, 2)
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 18}" font-size="14" text-anchor="end" fill="#222">{escape(row.name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" fill="{row.color}"/>',
            f'<text x="{LEFT + length + 8:.1f}" y="{y + 18}" font-size="13" fill="#222">{escape(row.label)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def draw(passes: list[dict[str, Any]]) -> str:
    """One bar per pass: median time to first token, and the share of cached prompt tokens."""
    tokens = sum(answer["prompt_tokens"] for answer in passes[0]["answers"])
    subtitle = f"{len(passes[0]['answers'])} answers, {tokens:,} prompt tokens per pass, median; embedded model, CPU"
    rows = []
    for one, color in zip(passes, COLORS, strict=True):
        value = statistics.median(answer["ttft"] for answer in one["answers"]) * 1000
        share = _share(one["answers"])
        label = f"{value:,.0f} ms" + (f", {share:.0%} of the prompt reused" if share else "")
        rows.append(Bar(one["name"], value, label, color))
    description = "Time to first token without the cache, with it cold, and with it warm"
    return bars("Time to first token", subtitle, description, rows)


def _share(answers: list[dict[str, Any]]) -> float:
    cached: int = sum(answer["cached_tokens"] for answer in answers)
    asked: int = sum(answer["prompt_tokens"] for answer in answers)
    return cached / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    args.picture.write_text(draw(json.loads(args.figures.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
