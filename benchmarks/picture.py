"""Draws the README's picture from the figures of `foreword demo --json FILE`.

    foreword demo --json demo.json && python benchmarks/picture.py demo.json docs/pictures/demo.svg

An SVG written by hand: three bars need no plotting library.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, ROW, LEFT, TOP, BAR = 720, 52, 150, 64, 26
COLORS = ("#9aa3ad", "#5b8fd6", "#1f6f43")


def draw(passes: list[dict[str, Any]]) -> str:
    """One bar per pass: median time to first token, and the share of prompt tokens that was not computed again."""
    medians = [statistics.median(answer["first_token"] for answer in one["answers"]) * 1000 for one in passes]
    shares = [_share(one["answers"]) for one in passes]
    scale = (WIDTH - LEFT - 190) / max(medians)
    height = TOP + ROW * len(passes) + 24
    tokens = sum(answer["prompt_tokens"] for answer in passes[0]["answers"])
    subtitle = f"{len(passes[0]['answers'])} answers, {tokens:,} prompt tokens per pass, median; embedded model, CPU"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img" '
        'aria-label="Time to first token without the cache, with it cold, and with it warm">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="16" y="26" font-size="17" font-weight="bold" fill="#222">Time to first token</text>',
        f'<text x="16" y="46" font-size="12" fill="#555">{escape(subtitle)}</text>',
    ]
    for i, (one, value, share, color) in enumerate(zip(passes, medians, shares, COLORS, strict=True)):
        y = TOP + ROW * i
        length = max(value * scale, 2)
        label = f"{value:,.0f} ms" + (f", {share:.0%} of the prompt reused" if share else "")
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 18}" font-size="14" text-anchor="end" fill="#222">{escape(one["name"])}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" fill="{color}"/>',
            f'<text x="{LEFT + length + 8:.1f}" y="{y + 18}" font-size="13" fill="#222">{escape(label)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


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
