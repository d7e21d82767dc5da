"""KV groups: the layers of a model that form each, and the paged tensors that keep their KV.

Layers with the same sliding window free the same blocks. All groups take blocks from one pool, so a block must be as large
in each of them: groups have equally many layers (some may have fewer and waste the rest), and layer `i` of every group uses
the tensors of column `i`. A block belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foreword.blocks.layout import LayerLayout
from foreword.blocks.resume import GroupKind, KVGroup

# Wasting memory in layers of full attention, which keep every token, is so much worse than in layers of a window.
_FULL_WEIGHT = 4


@dataclass(frozen=True, slots=True)
class GroupedLayers:
    """The layers of a model by KV group.

    Attributes:
        groups: the numbers of each group's layers.
        windows: each group's sliding window; None for full attention, whose groups come first.
        columns: what a layer in each column keeps per token.
    """

    groups: tuple[tuple[int, ...], ...]
    windows: tuple[int | None, ...]
    columns: tuple[LayerLayout, ...]

    def kv_groups(self, block_size: int) -> tuple[KVGroup, ...]:
        """The groups as the prefix cache sees them. A prompt that is cached to its end recomputes its last token, so a
        window group needs one token more than its layers see besides their own."""
        return tuple(
            KVGroup(GroupKind.FULL, block_size) if window is None else KVGroup(GroupKind.WINDOW, block_size, window + 1)
            for window in self.windows
        )

    def names(self) -> list[str]:
        """A name for each group that keeps its stored blocks apart from those of other groups; "" for the only one."""
        if len(self.groups) == 1:
            return [""]
        count = len(self.groups)
        kinds = ["full" if window is None else f"window {window}" for window in self.windows]
        return [
            f"{number}/{count} {kind}, layers {','.join(map(str, layers))}"
            for number, (kind, layers) in enumerate(zip(kinds, self.groups, strict=True))
        ]

    def column_of(self, layer: int) -> int:
        return next(group.index(layer) for group in self.groups if layer in group)

    def merged(self) -> GroupedLayers:
        """All layers in one group that keeps every token."""
        if len(self.groups) == 1:
            return replace(self, windows=(None,))
        layers = tuple(sorted(layer for group in self.groups for layer in group))
        return GroupedLayers((layers,), (None,), tuple(self.columns[self.column_of(layer)] for layer in layers))


def group_layers(layouts: Mapping[int, LayerLayout], windows: Mapping[int, int | None], longest: int) -> GroupedLayers:
    """Group the layers of a model whose sequences have at most `longest` tokens: a window that long is full attention.

    Layers that keep different amounts per token cannot share tensors: then there is one group, which keeps every token.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer in sorted(layouts):
        window = windows[layer]
        kinds.setdefault(window if window is not None and window < longest else None, []).append(layer)
    if len(kinds) == 1:
        return GroupedLayers(
            (tuple(sorted(layouts)),), tuple(kinds), tuple(layouts[layer] for layer in sorted(layouts))
        )
    if len(set(layouts.values())) > 1:
        return GroupedLayers((tuple(sorted(layouts)),), (None,), tuple(layouts[layer] for layer in sorted(layouts)))
    # Full attention first, then the widest window.
    ordered = sorted(kinds.items(), key=lambda kind: -(longest if kind[0] is None else kind[0]))
    size = _layers_per_group([len(layers) for _, layers in ordered])
    groups, spans = [], []
    for window, layers in ordered:
        for low in range(0, len(layers), size):
            groups.append(tuple(layers[low : low + size]))
            spans.append(window)
    return GroupedLayers(tuple(groups), tuple(spans), (next(iter(layouts.values())),) * size)


def _layers_per_group(counts: Sequence[int]) -> int:
    """Layers of a group, for kinds with these numbers of layers, the kind that keeps most first: little waste, few groups."""

    def cost(size: int) -> int:
        groups = [-(-count // size) for count in counts]
        return size * (_FULL_WEIGHT * groups[0] + sum(groups[1:])) + sum(groups)

    return min(range(max(counts), 0, -1), key=cost)
