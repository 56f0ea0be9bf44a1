"""`python -m server` is the command `worldserve`."""

import sys

from server.cli import main

sys.exit(main())
