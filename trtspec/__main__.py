"""`python -m trtspec` is the command `trtspec`, as `torchrun` needs it."""

import sys

from .cli import main

sys.exit(main())
