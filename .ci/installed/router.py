"""Checks the router's extra alone: no torch, no web framework of the server. A router starts with a tokenizer and answers."""

import importlib.util
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import foreword

assert not any(map(importlib.util.find_spec, ("torch", "starlette", "uvicorn", "httpx")))
tokenizer = Path(foreword.__file__).parent / "models" / "stdlib-nano"
flags = ["--replica", "http://127.0.0.1:9", "--tokenizer", str(tokenizer), "--port", "0"]
router = subprocess.Popen([sys.executable, "-m", "foreword", "route", *flags], stderr=subprocess.PIPE, text=True)
assert router.stderr is not None
try:
    url = next(line.split(" routes on ")[1].strip() for line in router.stderr if " routes on " in line)
    assert json.load(urllib.request.urlopen(f"{url}/health", timeout=10)) == {"status": "alive"}
finally:
    router.kill()
