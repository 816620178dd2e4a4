"""OneFlow GPT's ``python3 -m oneflow_gpt.training``: runs pretrain_gpt.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from pretrain_gpt import main  # noqa: E402

if __name__ == "__main__":
    main()
