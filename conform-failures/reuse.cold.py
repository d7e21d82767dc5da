"""reuse.cold: cannot make a model: ModuleNotFoundError: No module named 'torch'.

Found with no versions found. Run it with an interpreter that has `foreword[conform]`; empty the connector's store before.
"""

from foreword.referee.check_claims import reproduce

TARGET = {
    "transfer": {"kv_connector": "X", "kv_connector_module_path": "foreword.integrations.vllm"},
    "python": "/tmp/pytest-of-root/pytest-255/test_missing_packages_are_told0/python",
    "files": None,
    "engine": False,
}

if __name__ == "__main__":
    reproduce(TARGET, "reuse.cold", seed="1/reuse.cold", lengths=(100, 333, 600, 65))

# What the processes with the connector were sent, and what they answered, when it was found:
