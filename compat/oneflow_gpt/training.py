"""OneFlow GPT's ``python3 -m oneflow_gpt.training``: runs pretrain_gpt.py, with its defaults."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from pretrain_gpt import main  # noqa: E402

if __name__ == "__main__":
    if "RANK" not in os.environ:
        print(
            "oneflow_gpt.training is pretrain_gpt.py here, with its defaults: --seed 1234 (OneFlow "
            "GPT: 12345); sizes and --learning-rate have to be given",
            file=sys.stderr,
        )
    main()
