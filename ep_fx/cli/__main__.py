"""``python -m ep_fx.cli``."""

import sys

from ep_fx.cli import main

sys.exit(main())
