"""`python -m moe_lab VERB`: the command line without its installed script. Written by hand, as `__init__` is: a notebook cannot export this name."""
import sys

from moe_lab.cli import main

if __name__ == "__main__": sys.exit(main())
