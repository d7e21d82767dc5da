"""Starting weights whose attention has the pattern of induction heads.

From random weights a model of this size does not learn to copy from its prompt within an hour on one core; from these it
does within minutes.  The hidden state starts in parts: a constant, the token's own embedding, and codes of the preceding
token, of the one before it, and of tokens about five and ten back, which heads of the first layer copy there.  In the
second layer two heads add the code of the name that is spoken of: the two tokens after the last marker, such as `def` or
`does`.  Heads of two later layers look for positions whose preceding tokens and names are like the present ones, and copy
the token found there.  Feed-forward parts start at zero.  Training shapes all of it from there.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

HIDDEN, HEAD, GROUPS = 192, 32, 3
EMBEDDED: Final = 95  # dimensions of a token's own embedding; the last one is the marker's flag
TOKEN: Final = slice(1, 1 + EMBEDDED)
FIRST, SECOND, RECENT = slice(96, 128), slice(128, 160), slice(160, 192)
SCALE, CONSTANT, FLAG = 0.05, 0.2, 3.0
CONTENTS: Final = [pair + half for half in (0, HEAD // 2) for pair in range(6, 16)]  # hardly turn over 2,500 tokens


@torch.no_grad()
def prepare_attention(model: Any, theta: float, markers: list[int], alike: tuple[int, int]) -> None:
    """Write the starting weights into an untrained Llama of hidden size 192 with six heads of size 32.

    `markers` are the tokens that stand before a name. The first token of `alike` starts like the second: an answer's
    beginning like a docstring's.
    """
    weight = model.model.embed_tokens.weight
    weight.zero_()
    weight[:, TOKEN] = torch.randn(len(weight), EMBEDDED) * SCALE
    weight[alike[0]] = 0.6 * weight[alike[0]] + 0.8 * weight[alike[1]]
    weight[:, EMBEDDED] = 0.0
    weight[markers, EMBEDDED] = FLAG * SCALE
    weight[:, 0] = CONSTANT
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.zero_()
    norm = math.sqrt((EMBEDDED * SCALE**2 + CONSTANT**2) / HIDDEN)
    code = torch.zeros(HEAD, EMBEDDED)
    code[:-1, :-1], code[-1, -1] = orthogonal(HEAD - 1, EMBEDDED - 1), 1.0
    attentions = [layer.self_attn for layer in model.model.layers]
    look_back(attentions[0], (1.0, 2.0), (14.0, 14.0), CONSTANT / norm, theta, 0, code)
    look_back(attentions[0], (5.0, 10.0), (5.0, 3.0), CONSTANT / norm, theta, 1, code)
    look_for_name(attentions[1], 0, FIRST, 3.0, code)
    look_for_name(attentions[1], 1, SECOND, 2.0, code)
    for index, recent in ((2, 0.4), (3, 0.8)):
        for group in range(GROUPS):
            look_up(attentions[index], group, recent, code, SCALE / norm)


def orthogonal(rows: int, columns: int) -> torch.Tensor:
    """Return a random matrix with orthonormal rows or columns, whichever are fewer."""
    q: torch.Tensor = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns)))[0]
    return q if rows >= columns else q.mT


def look_back(
    attention: Any,
    distances: tuple[float, float],
    sharpness: tuple[float, float],
    constant: float,
    theta: float,
    group: int,
    code: torch.Tensor,
) -> None:
    """Let a group's two heads attend so many tokens back and copy that token's code to a part of the hidden state."""
    pairs = range(group, group + 3)
    size = math.sqrt(sharpness[0] * math.sqrt(HEAD))
    key = torch.zeros(HEAD)
    key[list(pairs)] = size
    set_head(attention.k_proj, group, slice(0, 1), key[:, None] / constant)
    set_head(attention.v_proj, group, TOKEN, code)
    for head, distance, sharp in zip((2 * group, 2 * group + 1), distances, sharpness, strict=True):
        query = torch.zeros(HEAD)
        for pair in pairs:
            angle = distance * theta ** (-pair / (HEAD // 2))
            query[pair], query[pair + HEAD // 2] = math.cos(angle), -math.sin(angle)
        set_head(attention.q_proj, head, slice(0, 1), query[:, None] * size * sharp / sharpness[0] / constant)
        part = RECENT if group else (FIRST, SECOND)[head % 2]
        turned = orthogonal(HEAD, HEAD) if group and head % 2 else torch.eye(HEAD)
        set_output(attention, head, part, turned * SCALE * (1.5 if group else 1.2))


def look_for_name(attention: Any, group: int, part: slice, size: float, code: torch.Tensor) -> None:
    """Let one head attend to the last token of which `part` says that it follows a marker, and copy that token's code."""
    key, query = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    pairs = [2, 3]
    key[pairs, part.stop - 1] = query[pairs, 0] = math.sqrt(8 * math.sqrt(HEAD)) / 3.6
    set_head(attention.k_proj, group, slice(0, HIDDEN), key)
    set_head(attention.q_proj, 2 * group, slice(0, HIDDEN), query)
    set_head(attention.v_proj, group, TOKEN, code)
    set_output(attention, 2 * group, RECENT, size * SCALE * (orthogonal(HEAD, HEAD) if group else torch.eye(HEAD)))


def look_up(attention: Any, group: int, recent: float, code: torch.Tensor, spread: float) -> None:
    """Let a group's two heads find positions whose preceding tokens are like the present ones, and copy their token."""
    codes = [orthogonal(len(CONTENTS), HEAD) * math.sqrt(2.4) / spread for _ in range(3)]
    key, query = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    key[CONTENTS, FIRST], key[CONTENTS, SECOND], key[CONTENTS, RECENT] = codes[0], 0.7 * codes[1], recent * codes[2]
    query[CONTENTS, TOKEN], query[CONTENTS, FIRST] = codes[0] @ code, 0.7 * codes[1]
    query[CONTENTS, RECENT] = recent * codes[2]
    copied = orthogonal(HEAD, EMBEDDED)
    set_head(attention.k_proj, group, slice(0, HIDDEN), key)
    set_head(attention.v_proj, group, TOKEN, copied)
    for head in (2 * group, 2 * group + 1):
        set_head(attention.q_proj, head, slice(0, HIDDEN), query)
        set_output(attention, head, TOKEN, SCALE * copied.mT)


def set_head(projection: torch.nn.Linear, head: int, columns: slice, weights: torch.Tensor) -> None:
    """Set a head's rows of a projection, and zero elsewhere."""
    rows = projection.weight[head * HEAD : (head + 1) * HEAD]
    rows.zero_()
    rows[:, columns] = weights


def set_output(attention: Any, head: int, part: slice, weights: torch.Tensor) -> None:
    """Set what a head adds to a part of the hidden state, and zero elsewhere."""
    columns = attention.o_proj.weight[:, head * HEAD : (head + 1) * HEAD]
    columns.zero_()
    columns[part] = weights
