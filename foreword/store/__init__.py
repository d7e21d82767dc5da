"""Stores that keep KV blocks outside the device: one contract (`base.py`), independent backends, and a tiered store."""
