"""Runs in an environment with vLLM: asks about images, and prints tokens, cached tokens and encoder runs as JSON.

    python vllm_encoder_script.py '{"model": DIR, "store": [URL, ...] or null, "encoder_store": [URL, ...] or null,
        "rounds": [[[seed of an image or null, ...], ...], ...]}'

Each prompt is a list of images, by the seeds of their pixels; null is a few words. Between rounds vLLM forgets its KV. With
`"abandon": true` the prompts of the first round are taken back after one step; with `"late": true` the namespaces of the stores
are read only once the scheduler has asked for the outputs of its first request; with `"switched": true` the
server's namespace changes to another that the stores have when the scheduler has just found an output.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

from vllm_case import WITHIN, finish, make_llm, worker_of

SIZE = 56
WORDS = " ".join(f"t{number}" for number in range(5, 25))


def image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))


def prompt(parts: list[int | None], uuids: list[str] | None) -> dict[str, Any]:
    text = "t1 t2 " + " ".join(WORDS if part is None else "<image> t3" for part in parts)
    images = [image(part) for part in parts if part is not None]
    named = {"multi_modal_uuids": {"image": uuids}} if uuids else {}
    return {"prompt": f"{text} {WORDS}", **({"multi_modal_data": {"image": images}} if images else {}), **named}


class Encoder:
    """Counts the images that the model encodes."""

    def __init__(self, model: Any) -> None:
        self.images = 0
        self._embed = model.embed_multimodal
        model.embed_multimodal = self

    def __call__(self, **given: Any) -> Any:
        found = self._embed(**given)
        self.images += len(found)
        return found


def delay_namespaces() -> None:
    from foreword.integrations.vllm_extras.encoder_cache import EncoderReader, EncoderStore

    asked, follow, ready = threading.Event(), EncoderStore.follow, EncoderReader.ready

    def late(store: EncoderStore) -> None:
        asked.wait(WITHIN)
        follow(store)

    def ask(reader: EncoderReader, *given: Any) -> bool:
        found = ready(reader, *given)
        asked.set()
        return found

    patch.object(EncoderStore, "follow", late).start()
    patch.object(EncoderReader, "ready", ask).start()


def switch_namespaces() -> None:
    from foreword.integrations.vllm_extras.encoder_cache import EncoderReader

    has = EncoderReader.has

    def switched(reader: EncoderReader, identifier: str) -> bool:
        found = has(reader, identifier)
        if found and reader._store.others:
            reader._store.adopt(reader._store.others[0])
        return found

    patch.object(EncoderReader, "has", switched).start()


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    if job.get("late"):
        delay_namespaces()
    if job.get("switched"):
        switch_namespaces()
    from vllm import SamplingParams

    given = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 8}, **job.get("llm", {})}
    if job.get("encoder_store"):
        given["ec_transfer_config"] = {
            "ec_connector": "ForewordECConnector",
            "ec_connector_module_path": "foreword.integrations.vllm",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {
                "store": job["encoder_store"],
                "lookup_timeout": WITHIN,
                "load_timeout": WITHIN,
                "flush_seconds": WITHIN,
            },
        }
    llm = make_llm({**job, "llm": given})
    encoders: list[Encoder] = []
    llm.apply_model(lambda model: encoders.append(Encoder(model)))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    rounds = []
    for number, prompts in enumerate(job["rounds"]):
        before = encoders[0].images
        uuids = job["uuids"][number] if "uuids" in job else [None] * len(prompts)
        asked = [prompt(*one) for one in zip(prompts, uuids, strict=True)]
        if job.get("abandon") and not number:
            names = [llm.llm_engine.add_request(f"abandoned-{at}", one, params) for at, one in enumerate(asked)]
            llm.llm_engine.step()
            llm.llm_engine.abort_request([name or f"abandoned-{at}" for at, name in enumerate(names)], internal=True)
            time.sleep(1.0)  # what is read for them arrives
            asked = []
        outputs = llm.generate(asked, params, use_tqdm=False)
        answers = [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs]
        rounds.append({"answers": answers, "encoded": encoders[0].images - before})
        if job["store"] is not None:
            assert worker_of(llm).offload.flush(WITHIN)
        llm.reset_prefix_cache()
        if job.get("forget_outputs"):
            llm.llm_engine.engine_core.engine_core.reset_encoder_cache()
    from vllm.distributed.ec_transfer import has_ec_transfer
    from vllm.distributed.ec_transfer.ec_transfer_state import ensure_ec_transfer_shutdown

    if has_ec_transfer():
        ensure_ec_transfer_shutdown()
    finish({"rounds": rounds})


if __name__ == "__main__":
    main()
