#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Evaluates what retrieval gives a model: perplexity with and without neighbours.

    python tools/retro/evaluate.py --load gpt --retro-project-dir retro --output gpt.json

    python tools/retro/evaluate.py --load retro-model --retro-project-dir retro \
        --neighbors own,none,shuffled --compare GPT=gpt.json --figure leakage.png

Reads the validation samples of a project of tools/retro/preprocess_data.py. Next to the perplexity
of all of them it says that of chunks by the share of each that its nearest neighbours have word for
word: a gain on chunks that share little is no copying (Borgeaud et al. 2022, section 2.6). --load
takes a Retro or a GPT of any format, in any layout.
"""

from megatron.apps.retro.evaluation import run_evaluation
from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and evaluates."""
    with ending_process(), errors_for_users():
        run_evaluation(__doc__)


if __name__ == "__main__":
    main()
