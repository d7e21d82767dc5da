"""`python -m foreword`."""

from foreword.cli.main import main

main()
