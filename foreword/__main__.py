"""`python -m foreword`, and the command `foreword`."""

import sys


def main() -> None:
    """Run the command. If a package of an extra is missing, say which extra installs it: exit status 2."""
    try:
        from foreword.cli import main as cli

        cli.main()
    except ModuleNotFoundError as error:
        if error.name is None or "." in error.name or error.name == "foreword":
            raise
        print(
            f"foreword: the package {error.name} is not installed; install this command with "
            "pip install 'foreword[server]' (foreword[router] for a router, foreword[vllm] beside vLLM, "
            "foreword[conform] for `foreword conform`)",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
