"""The `foreword` command with the compiled modules of the simulator."""

from __future__ import annotations

from foreword.sim.compiled import use_compiled

if __name__ == "__main__":
    use_compiled()
    from foreword.cli.main import main

    main()
