"""Extras of the vLLM connector: hand-off of prompts between instances, stores of other instances, the memory of workers for a
scheduler in another process, and outputs of encoders in stores."""

from foreword.integrations.vllm_extras.transfer import VllmTransfer

TRANSFER = VllmTransfer()
