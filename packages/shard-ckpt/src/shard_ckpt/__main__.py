"""``python -m shard_ckpt``, the same as ``shard ckpt``."""

from __future__ import annotations

import sys

from shard_ckpt._cli import main

if __name__ == "__main__":
    sys.exit(main())
