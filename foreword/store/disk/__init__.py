"""A store in a folder, shared by all processes that open it: one file per block and an SQLite index."""
