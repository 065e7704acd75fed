"""`python -m tba` is the same as the `tba` command."""

import sys

# `python -m` has put the working directory there, where a random.py would be imported in place of Python's.
if not sys.flags.safe_path:
    del sys.path[0]

from tba.cli import main

main()
