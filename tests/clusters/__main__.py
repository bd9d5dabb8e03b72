"""`python -m tests.clusters` runs the command line of tests.clusters.command."""

import sys

from tests.clusters.command import main

if __name__ == "__main__":
    sys.exit(main())
