#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Averages the predictions of several fine-tuned models.

    python tasks/ensemble_classifier.py --paths runs/mnli-1 runs/mnli-2 --outdir ensemble \
        --prediction-name predictions.jsonl --eval

Each folder has a file of predictions: JSON lines of tasks/main.py --predictions, or Megatron-LM's
test_predictions.pt.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a checkout that is not installed

from megatron.apps.tasks.fine_tuning.ensemble import EnsembleConfig, run_ensemble  # noqa: E402
from megatron.config import parse_configs  # noqa: E402
from megatron.run.process import errors_for_users  # noqa: E402


def main() -> None:
    """Parses the command line and averages."""
    with errors_for_users():
        (config,) = parse_configs((EnsembleConfig,), description=__doc__)
        run_ensemble(config)


if __name__ == "__main__":
    main()
