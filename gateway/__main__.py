"""`python -m gateway` is `detgate`."""

import sys

from gateway.cli import main

sys.exit(main())
