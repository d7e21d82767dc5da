"""`python -m foreword`, and the command `foreword`."""

import sys

# The extras of commands that are not in `server`.
_EXTRAS = {"route": "router", "conform": "conform", "simulate": "simulator"}


def main() -> None:
    """Run the command. If a package of an extra is missing, say which extra installs it: exit status 2."""
    try:
        from foreword.cli import main as cli

        cli.main()
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
