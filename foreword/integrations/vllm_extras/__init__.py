"""Extras of the vLLM connector: hand-off of prompts between instances, stores of other instances, the memory of workers for a
scheduler in another process, cache control and agents' sessions, and outputs of encoders in stores."""
