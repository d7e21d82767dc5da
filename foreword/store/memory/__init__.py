"""A store in the memory of this process."""
