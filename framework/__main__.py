"""`python -m framework` is `tunesmith`."""

import sys

from framework.cli import main

if __name__ == "__main__":
    sys.exit(main())
