"""``python -m shard_train``, the same as ``shard``."""

from __future__ import annotations

import sys

from shard_train._cli import main

if __name__ == "__main__":
    sys.exit(main())
