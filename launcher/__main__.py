"""``python -m launcher`` is ``tandem``."""

from __future__ import annotations

import sys

from launcher.cli import main

sys.exit(main())
