"""`python -m foreword`."""

from foreword.cli import main

main()
