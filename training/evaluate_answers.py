"""Measure what the embedded model's answers are worth: on modules held out of its training, and where the docs show it.

Asks "What does NAME do?" about excerpts of 500, 1,500 and 2,500 tokens and counts the answers that are the first sentence
of the docstring, or begin with its first five words; then prints the answers of README, quickstart and `foreword demo`, and
the loss on held-out source. Greedy, float32. Run ``python training/evaluate_answers.py --help`` for the options.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import textwrap
from pathlib import Path
from typing import Any, Final

import reading
import torch
import train_embedded_model as training
from transformers import AutoTokenizer, LlamaForCausalLM

from foreword.cli import demo

Message = dict[str, str]
INTRODUCTION: Final = "Answer questions about this module.\n\n"


def answer(model: Any, tokenizer: Any, messages: list[Message], max_tokens: int) -> str:
    """Return the greedy answer to a conversation."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    return complete(model, tokenizer, ids, max_tokens)


@torch.inference_mode()
def complete(model: Any, tokenizer: Any, ids: torch.Tensor, max_tokens: int) -> str:
    """Return the greedy continuation of token ids of shape (1, tokens)."""
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def questions(texts: list[str], tokens: int, count: int, tokenizer: Any) -> list[tuple[list[Message], str]]:
    """Return conversations about excerpts of about so many tokens, and the sentence that each asks for."""
    rng = random.Random(tokens)
    found = [(text, reading.entries_of(text)) for text in texts]
    files = [(text, entries) for text, entries in found if entries]
    asked: list[tuple[list[Message], str]] = []
    while len(asked) < count:
        text, entries = files[len(asked) % len(files)] if rng.random() < 0.5 else rng.choice(files)
        picked = reading.excerpt(text, entries, int(3.3 * tokens), rng)
        if picked is None or not 0.8 < len(tokenizer(picked.content).input_ids) / tokens < 1.25:
            continue
        entry = rng.choice(picked.entries)
        system = {"role": "system", "content": INTRODUCTION + picked.content}
        asked.append(([system, {"role": "user", "content": f"What does {entry.name} do?"}], entry.sentence))
    return asked


def share_of_answers(model: Any, tokenizer: Any, asked: list[tuple[list[Message], str]]) -> dict[str, float]:
    """Return which share of the answers is the sentence, and which begins with its first five words."""
    equal = begun = 0
    for messages, sentence in asked:
        given = " ".join(answer(model, tokenizer, messages, 48).split())
        equal += given == sentence
        begun += given.split()[:5] == sentence.split()[:5]
    count = len(asked)
    return {"questions": count, "equal": round(equal / count, 3), "first_five_words": round(begun / count, 3)}


def documented_answers(model: Any, tokenizer: Any) -> dict[str, str]:
    """Return what the model answers in README, quickstart and `foreword demo`."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    asked = "What does dedent do?"
    messages = [{"role": "system", "content": INTRODUCTION + source[-8000:]}, {"role": "user", "content": asked}]
    shown = {f"README: {asked}": answer(model, tokenizer, messages, 32)}
    for prompt in ("import unittest\n\nclass ", f"{source[-8000:]}\ndef dedent("):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        shown[f"continued: {prompt[-24:]}"] = complete(model, tokenizer, ids, 32)
    for talk in demo.QUESTIONS:
        messages = [{"role": "system", "content": INTRODUCTION + demo.manual()}]
        for asked in talk:
            messages.append({"role": "user", "content": asked})
            given = answer(model, tokenizer, messages, 32)
            messages.append({"role": "assistant", "content": given})
            shown[f"demo: {asked}"] = given
    return shown


def held_out_texts() -> tuple[list[str], list[str]]:
    """Return the held-out sources of the standard library, and those of the packages."""
    library = Path(sysconfig.get_path("stdlib"))
    held = [(path, text) for path, text in training.collect_texts(library) if training.is_held_out(path)]
    packages = [text for path, text in held if training.is_of_package(path)]
    return [text for path, text in held if not training.is_of_package(path)], packages


def main() -> None:
    """Measure one model and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[1] / "foreword" / "models" / "stdlib-nano"
    parser.add_argument("--model", type=Path, default=default, help="folder of the model")
    parser.add_argument("--contexts", type=int, nargs="*", default=[500, 1500, 2500], help="tokens of the excerpts")
    parser.add_argument("--questions", type=int, default=40, help="questions per length and group of files")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--report", action="store_true", help="also write the shares to the model's report and card")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    groups = dict(zip(("standard library", "packages"), held_out_texts(), strict=True))
    print(json.dumps(documented_answers(model, tokenizer), indent=2), flush=True)
    shares: dict[str, dict[str, float]] = {}
    for name, texts in groups.items():
        for tokens in arguments.contexts:
            asked = questions(texts, tokens, arguments.questions, tokenizer)
            shares[f"{name}, {tokens:,} tokens"] = share_of_answers(model, tokenizer, asked)
    print(json.dumps(shares, indent=2), flush=True)
    sources = [f"<|bos|>{text}<|eos|>" for text in groups["standard library"]]
    ids = training.encode_documents(tokenizer.backend_tokenizer, sources)
    print(f"loss on held-out source: {training.mean_loss(model, ids, 1024, 200_000):.4f}")
    if arguments.report:
        path = arguments.model / "training_report.json"
        report = json.loads(path.read_text(encoding="utf-8"))
        training.write_report(arguments.model, {**report, "answers": shares})


if __name__ == "__main__":
    main()
