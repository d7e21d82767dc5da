"""Cuts a schema down to what one of the files in deploy/ uses of it, so that the tests can carry it.

    git show v1.7.0:ray-operator/config/crd/bases/ray.io_rayservices.yaml \\
      | python tests/schemas/prune.py deploy/kuberay/rayservice.yaml SOURCE > tests/schemas/rayservice.json

Reads a CustomResourceDefinition or the JSON schema of a Helm chart's values. What the file uses keeps its type, enumeration,
pattern and required names. Of the rest the names stay, so that an unknown one is an error. What belongs to a pod is left out
(`"pod": true`): the tests check it against the schemas of Kubernetes. SOURCE says where the schema is from. All are under
Apache-2.0.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

POD = ("containers", "terminationGracePeriodSeconds")
_KEPT = ("type", "enum", "pattern", "required", "minimum", "maximum", "x-kubernetes-int-or-string")


def prune(schema: dict[str, Any], used: Any) -> dict[str, Any]:
    """The part of a schema that says something about this value."""
    properties: dict[str, Any] = schema.get("properties", {})
    found = {key: schema[key] for key in _KEPT if schema.get(key)}
    if "nodeName" in properties:
        properties = {name: {} if name in POD else one for name, one in properties.items()}
        found["pod"] = True
    if isinstance(used, dict) and properties:
        found["properties"] = {
            name: prune(one, used[name]) if name in used else {} for name, one in sorted(properties.items())
        }
        found |= _closed(schema)
    elif isinstance(used, dict) and isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = prune(schema["additionalProperties"], next(iter(used.values()), None))
    elif isinstance(used, list) and isinstance(schema.get("items"), dict):
        merged: dict[str, Any] = {}
        for one in used:
            merged |= one if isinstance(one, dict) else {}
        found["items"] = prune(schema["items"], merged or (used or [None])[0])
    return found


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Drops what a CRD does not know, which `kubectl` warns of; a Helm chart's schema says what it allows."""
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("additionalProperties", False)
    return {} if open_ended else {"additionalProperties": False}


def main() -> None:
    used = yaml.safe_load(Path(sys.argv[1]).read_text())
    whole = yaml.load(sys.stdin, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if whole.get("kind") == "CustomResourceDefinition":
        version = used["apiVersion"].rpartition("/")[2]
        [whole] = [one["schema"]["openAPIV3Schema"] for one in whole["spec"]["versions"] if one["name"] == version]
        whole["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    pruned = {"$comment": f"A part of {sys.argv[2]}, made by tests/schemas/prune.py", **prune(whole, used)}
    print(json.dumps(pruned, indent=1))


if __name__ == "__main__":
    main()
