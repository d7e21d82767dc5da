"""Tool calls and reasoning in the text of a model: read from it as it streams, and written into it."""
