#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Measures the difficulty of training samples, as tools/analyze_data.py does.

    python examples_deepspeed/data_efficiency/analyze_data.py --analyzing-task map \
        --analyzing-data-type GPT --analyzing-metric total_vocab_freq --analyzing-num-workers 4 \
        --analyzing-worker-id 0 --analyzing-num-threads 40 --train-data-exact-num-epochs 1 \
        --save analysis [the flags of pretrain_gpt.py]

    python examples_deepspeed/data_efficiency/analyze_data.py --analyzing-task reduce ...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.analyze_data import main  # noqa: E402  # of this repository

if __name__ == "__main__":
    main()
