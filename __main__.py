"""`python -m tba` is the same as the `tba` command."""

from tba.cli import main

main()
