#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Converts a Llama between Hugging Face and this project, with Megatron-DeepSpeed's flags.

    deepspeed tools/hf2megads_weight_converter.py --hf-ckpt-dir llama-2-7b-hf --load-mode auto \
        --hf-ckpt-num-shards 2 --save llama-7b-mega-ds
    deepspeed tools/hf2megads_weight_converter.py --to-hf-ckpt --hf-ckpt-dir llama-2-7b-hf \
        --load llama-7b-mega-ds --save llama-2-7b-hf-out

Flags of training may follow: sizes are compared with the model, the rest has no effect, because any
layout loads the checkpoint. One process converts, the others end. Logits are compared first.
"""

from megatron.formats.conversion.megatron_programs import convert
from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and converts."""
    with ending_process(), errors_for_users():
        convert(__doc__)


if __name__ == "__main__":
    main()
