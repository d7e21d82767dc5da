"""The requests that `vllm/offload.py` sends: prompts as lists of token ids, drawn from a seed or read from real sessions."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

Prompt = list[int]
VOCABULARY = 4000


def tokens(draw: random.Random, count: int) -> Prompt:
    """Random ids that every model of the benchmarks has; 0 to 10 are left out, as they often mean something."""
    return [draw.randrange(11, VOCABULARY) for _ in range(count)]


def documents(draw: random.Random, scale: float) -> list[Prompt]:
    """Six documents of 2,000 to 7,000 tokens (times `scale`), asked three questions each, in turn."""
    texts = [tokens(draw, int(length * scale)) for length in (2000, 3000, 4000, 5000, 6000, 7000)]
    return [[*text, *tokens(draw, 30)] for _ in range(3) for text in texts]


def shared(draw: random.Random, starts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts in turn over the starts, each with 700 tokens of its own."""
    return [[*starts[number % len(starts)], *tokens(draw, 700)] for number in range(count)]


def chat(draw: random.Random, scale: float) -> list[Prompt]:
    """Eight conversations of six turns that take turns, with a system prompt of 600 tokens (times `scale`) in common; each
    turn has all that was said before."""
    system = tokens(draw, int(600 * scale))
    talks = [list(system) for _ in range(8)]
    asked = []
    for _ in range(6):
        for talk in talks:
            talk += tokens(draw, int(draw.randrange(100, 400) * scale))
            asked.append(list(talk))
            talk += tokens(draw, int(100 * scale))
    return asked


def agents(folder: Path, model: Path, steps: int, longest: int) -> tuple[list[Prompt], str]:
    """The steps of `agent_sessions`, taking turns, and the sentence about them."""
    sessions, about = agent_sessions(folder, model, steps, longest)
    return in_turn(sessions), about


def agent_sessions(folder: Path, model: Path, steps: int, longest: int) -> tuple[list[list[Prompt]], str]:
    """Sessions of a real agent, and a sentence that says what was left out.

    Every `agent-*.jsonl` is a session, each line a step with its whole `input`. The text becomes tokens with the model's
    own tokenizer.json. A session's first `steps` steps of 16 to `longest` tokens are taken.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sessions, left = [], 0
    for path in sorted(folder.glob("agent-*.jsonl")):
        texts = [json.loads(line)["input"] for line in path.read_text(encoding="utf-8").splitlines()]
        encoded = [one.ids for one in tokenizer.encode_batch(texts)]
        fitting = [one for one in encoded if 16 <= len(one) <= longest]
        sessions.append(fitting[:steps])
        left += len(texts) - len(sessions[-1])
    about = (
        f"{len(sessions)} sessions, {sum(map(len, sessions))} steps, {sum(len(one) for some in sessions for one in some):,} "
        f"tokens; the first {steps} steps of each, without those above {longest:,} tokens ({left} steps left out)"
    )
    return sessions, about


def in_turn(sessions: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The first of each, the second of each, and so on."""
    longest = max(map(len, sessions), default=0)
    return [session[i] for i in range(longest) for session in sessions if i < len(session)]


def boundaries(draw: random.Random, block: int, count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of mixed lengths around every block boundary, and as many that begin like one of them: `count` together.

    The second list's prompts share exactly n blocks, or a token less or more, with one of the first, for every n up to 16.
    """
    known = count * 3 // 5
    edges = [blocks * block + over for blocks in range(1, 17) for over in (-1, 0, 1)]
    lengths = [*edges, 16 * block + 7]
    lengths += [draw.randrange(5, 17 * block) for _ in range(known - len(lengths))]
    first = [tokens(draw, length) for length in lengths]
    long = [prompt for prompt in first if len(prompt) >= 16 * block + 1]
    second = []
    for number in range(count - known):
        shared = edges[number % len(edges)]
        begin = draw.choice(long)[:shared]
        # The first token after what is shared must differ.
        second.append([*begin, 11 + number % 7, *tokens(draw, draw.randrange(1, 90))])
    return first[:known], second
