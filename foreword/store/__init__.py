"""Where blocks rest: one contract (base.py), and backends side by side that do not know each other."""
