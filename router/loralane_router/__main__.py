"""`python -m loralane_router` is `loralane`."""

import sys

from loralane_router.cli import main

sys.exit(main())
