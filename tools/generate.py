#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Generates text from a training checkpoint.

    python tools/generate.py --load checkpoints --prompt 'def main():' --temperature 0.8 --top-p 0.9

    torchrun --nproc-per-node 2 tools/generate.py --tensor-model-parallel-size 2 \
        --load checkpoints --prompt-file prompts.txt --output texts.jsonl

    python tools/generate.py --load checkpoints --num-samples 100 --genfile samples.jsonl

    python tools/generate.py --load Qwen2.5-0.5B-Instruct --chat

    python tools/generate.py --load retro --retro --retro-project-dir project --prompt 'The'

Without a prompt it reads prompts line by line until "stop", and shows each text while it is
generated; with --chat the lines are a conversation with an instruct model. --load takes a
checkpoint of this project, Hugging Face, Megatron or DeepSpeed, in any layout; the texts of all
layouts are the same. With --retro a model of pretrain_retro.py reads the neighbours of what it
writes, chunk by chunk, and their text and sources follow its own.
"""

from megatron.apps.generation.generation.command import run_generation
from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and generates."""
    with ending_process(), errors_for_users(outlives_output=False):
        run_generation(__doc__)


if __name__ == "__main__":
    main()
