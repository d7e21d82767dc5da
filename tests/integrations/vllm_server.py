"""`vllm serve` as a process, for tests that need FOREWORD_VLLM_PYTHON, an interpreter with vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import tokenizers
import torch
import transformers
import vllm_process
from ports import free_port
from vllm_waits import WITHIN

from foreword.referee.process import Forked

BLOCK = 32
END = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_byte_model(folder: Path) -> Path:
    """A small Llama with random weights and a tokenizer with one token per byte: most characters that it generates
    span several tokens or are broken."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=END + 1, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.2, max_position_embeddings=1024,
        pad_token_id=END, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


class VllmServer:
    """A `vllm serve` in its own process group, which serves the model as `tiny`.

    Args:
        log: what the server prints.
        flags: more of its flags.
        core: the core that it computes on.
        forked: from a process that has imported vLLM; otherwise it is started by the command, as users do.
        variables: more environment variables.
    """

    def __init__(
        self, model: Path, log: Path, *flags: str, core: int = 0, forked: bool = True, **variables: str
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        arguments = [
            "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details", *flags,
        ]  # fmt: skip
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            **variables,
        }
        with log.open("w") as output:
            self.process: Forked | subprocess.Popen[str] = vllm_process.serve(arguments, environment, output, forked)

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=WITHIN) as answer:
            return bool(answer.status == 200)
        return False

    def stop(self, number: int = signal.SIGTERM, within: float = WITHIN) -> None:
        """Stop the server, and kill what is left of it."""
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WITHIN)

    def kill(self) -> None:
        """End it without warning, with all its processes."""
        self.stop(signal.SIGKILL)
