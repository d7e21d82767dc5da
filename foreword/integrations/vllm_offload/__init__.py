"""Foreword's stores as a secondary tier of vLLM's own KV offloading."""
