"""`python -m trtspec` is the command `trtspec`, as `torchrun` needs it."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
