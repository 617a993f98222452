"""``python -m openconv.bench.report``: rewrite the tables of README.md and docs/results from what was recorded."""

import sys

from .documents import main

sys.exit(main())
