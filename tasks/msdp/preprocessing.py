#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Makes the data of dialogues by prompting (MSDP).

    python tasks/msdp/preprocessing.py --func process_wow_dataset --raw_file train.json \
        --processed_file train_processed.txt

    python tasks/msdp/preprocessing.py --func get_knwl_gen_prompts --model_file dpr \
        --train_file train_processed.txt --test_file test_processed.txt --data_type wow_seen \
        --processed_file knowledge_prompts.json
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from megatron.apps.msdp.preprocessing import PreprocessingConfig, run_preprocessing  # noqa: E402
from megatron.config import parse_configs  # noqa: E402
from megatron.run.process import errors_for_users  # noqa: E402


def main() -> None:
    """Parses the command line and makes what it asks for."""
    with errors_for_users():
        (config,) = parse_configs((PreprocessingConfig,), description=__doc__)
        run_preprocessing(config)


if __name__ == "__main__":
    main()
