"""python tests/apps/generation/server/serve_fake.py --port 0: a server without a model."""

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1]),
    str(Path(__file__).parents[3]),
]

from serving import main  # noqa: E402

if __name__ == "__main__":
    main()
