"""`python -m foreword`, and the command `foreword`."""

import logging
import os
import sys

# The extras of commands that are not in `server`.
_EXTRAS = {"route": "router", "conform": "conform", "simulate": "simulator"}
# Commands that load torch and leave nothing open.
_CLOSED = ("serve", "doctor")


def main() -> None:
    """Run the command. If a package of an extra is missing, say which extra installs it: exit status 2."""
    try:
        from foreword.cli import main as cli

        cli.main()
    except SystemExit as end:
        if sys.argv[1:2] and sys.argv[1] in _CLOSED and "torch" in sys.modules and isinstance(end.code, int):
            # Python would take apart the objects of torch and Transformers one by one, for a second and more.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
    except ModuleNotFoundError as error:
        if error.name is None or "." in error.name or error.name == "foreword":
            raise
        extra = _EXTRAS.get(sys.argv[1] if len(sys.argv) > 1 else "", "server")
        print(
            f"foreword: the package {error.name} is not installed; install what this command needs with "
            f"pip install 'foreword[{extra}]'{' (foreword[vllm] beside vLLM)' if extra == 'server' else ''}",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
