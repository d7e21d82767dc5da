"""A Ray Data job over vLLM workers on this machine, in an environment that `.ci/ray` makes; `ray_batch.py` and a test start it.

    python -m benchmarks.vllm.ray_job '{"model": FOLDER, "store": [URL, ...] or null, "prompts": FILE, "workers": 2}'

Starts a cluster of its own. FILE has the prompts as JSON, lists of tokens. Prints a line of JSON for each answer when it comes:
the number of the prompt, the tokens, the number of the request at its worker, and when it came to vLLM and was answered.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

# Workers share the cores: none binds its threads to them, and each computes with one.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
}
ROWS = 4  # of a block; a block is what Ray Data gives to a worker


def main(job: dict[str, Any]) -> None:
    """Run the job."""
    ray.init(
        address="local",
        num_cpus=job["workers"] + 1,  # one for reading and for what comes after vLLM
        object_store_memory=100 << 20,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=True,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = 900  # no worker begins before all are there
    llm: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_num_seqs": 8,
        **job.get("llm", {}),
    }
    if job["store"] is not None:
        llm["kv_transfer_config"] = {
            "kv_connector": "ForewordConnector",
            "kv_connector_module_path": "foreword.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": job["store"]},
        }
    config = vLLMEngineProcessorConfig(
        model_source=job["model"],
        engine_kwargs=llm,
        placement_group_config={"bundles": [{"CPU": 1}]},  # without it a worker wants a GPU
        concurrency=(job["workers"], job["workers"]),
        batch_size=ROWS,
        # The first worker that is ready takes no more than it can compute at once.
        max_concurrent_batches=2,
        max_tasks_in_flight_per_actor=2,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        runtime_env={"env_vars": VARIABLES},
    )
    sampling = {"temperature": 0, "max_tokens": job.get("new_tokens", 8), "ignore_eos": True, "detokenize": False}
    process = build_processor(
        config,
        preprocess=lambda row: {"tokenized_prompt": row["prompt_tokens"], "sampling_params": sampling},
        postprocess=lambda row: {
            "number": row["number"],
            "request": row["request_id"],
            "tokens": row["generated_tokens"],
            "came": row["metrics"]["queued_ts"],
            "answered": row["metrics"]["last_token_ts"],
        },
    )
    prompts = json.loads(Path(job["prompts"]).read_text())
    rows = [{"number": number, "prompt_tokens": prompt} for number, prompt in enumerate(prompts)]
    for row in process(ray.data.from_items(rows, override_num_blocks=-(-len(rows) // ROWS))).iter_rows():
        answer = {name: float(row[name]) for name in ("came", "answered")}
        answer |= {name: int(row[name]) for name in ("number", "request")}
        print(json.dumps({**answer, "tokens": [int(token) for token in row["tokens"]]}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
