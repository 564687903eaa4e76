"""`python -m tunesmith` is `python -m framework`."""

import sys

from framework.__main__ import main_of_module

if __name__ == "__main__":
    sys.exit(main_of_module())
