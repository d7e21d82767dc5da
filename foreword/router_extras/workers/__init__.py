"""Several processes of a router on one port (`--workers`)."""
