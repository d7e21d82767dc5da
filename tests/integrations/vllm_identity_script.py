"""Runs in an environment with vLLM: asks while adapters and weights change, and prints tokens and cached tokens as JSON.

    python vllm_identity_script.py '{"model": DIR, "store": [URL, ...], "steps": [{"ask": [[token, ...], ...]}, ...]}'

Steps: "ask", with "adapter": [name, number, path]; "forget", vLLM's own cache, and the connector's if true; "copy", a folder
over another; "weights", a factor for all weights; "version" of the weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from vllm_case import WITHIN, finish, make_llm, worker_of


def scale(model: Any, factor: float) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(factor)


def ask(llm: Any, prompts: list[list[int]], adapter: list[Any] | None) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    chosen = LoRARequest(*adapter[:3], load_inplace="in place" in adapter) if adapter is not None else None
    outputs = llm.generate(asked, params, use_tqdm=False, lora_request=chosen)
    if llm.llm_engine.vllm_config.kv_transfer_config is not None:
        assert worker_of(llm).offload.flush(WITHIN)
    return [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs]


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    llm = make_llm(job)
    found = []
    for step in job["steps"]:
        match step:
            case {"ask": prompts}:
                found.append(ask(llm, prompts, step.get("adapter")))
            case {"forget": connector}:
                assert llm.reset_prefix_cache(reset_connector=connector)
            case {"copy": [source, target]}:
                shutil.copytree(source, target, dirs_exist_ok=True)
            case {"weights": factor}:
                llm.apply_model(lambda model, factor=factor: scale(model, factor))
            case {"version": name}:
                llm.llm_engine.set_weight_version(name)
    finish({"answers": found})


if __name__ == "__main__":
    main()
