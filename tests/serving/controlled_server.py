"""`foreword serve` that a test controls with files in a folder, so that the test does not depend on the speed of the machine.

While the file `pace` exists, every step of the engine takes at least as many seconds as it contains. While `loading` exists,
the model is not loaded. Blocks found in a store are always loaded, even if computing them would be faster.

python controlled_server.py FOLDER serve ...
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from foreword.cli import main as cli
from foreword.server import process


def main() -> None:
    folder = Path(sys.argv.pop(1))
    load = process.load_engine

    def led(*arguments: Any, **named: Any) -> Any:
        while (folder / "loading").exists():
            time.sleep(0.01)
        engine: Any = load(*arguments, **named)
        runner = engine._core._runner
        run = runner.run

        def at_pace(*step: Any) -> Any:
            with suppress(FileNotFoundError):
                time.sleep(float((folder / "pace").read_text()))
            return run(*step)

        runner.run = at_pace
        if engine.offload is not None:
            engine.offload.costs.prefill_rate = float
        return engine

    process.load_engine = led
    cli.main()


if __name__ == "__main__":
    main()
