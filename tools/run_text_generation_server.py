#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Serves a checkpoint that generates text: Megatron's PUT /api, OpenAI's API, and a page.

    python tools/run_text_generation_server.py --load checkpoints

    torchrun --nproc_per_node 2 tools/run_text_generation_server.py --load checkpoints \
        --tensor-model-parallel-size 2 --host 0.0.0.0 --api-key-file key.txt

    curl 'http://localhost:5000/api' -X 'PUT' \
        -H 'Content-Type: application/json; charset=UTF-8' \
        -d '{"prompts":["Hello world"], "tokens_to_generate":1}'

--load takes a checkpoint of this project, Hugging Face, Megatron or DeepSpeed; model and tokenizer
are the checkpoint's. The page is at http://localhost:5000/, the base URL of OpenAI's clients is
http://localhost:5000/v1. SIGTERM and Ctrl-C let running requests end. Needs the extra "serve".
"""

from megatron.apps.generation.server.command import run_server
from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and serves."""
    with ending_process(), errors_for_users():
        run_server(__doc__)


if __name__ == "__main__":
    main()
