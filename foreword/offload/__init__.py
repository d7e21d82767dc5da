"""Offload: KV blocks between the device and the stores. Load or recompute, write behind, stage, pin."""
