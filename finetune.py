# PYTHON_ARGCOMPLETE_OK
r"""Fine-tunes a model: from the folder of a Hugging Face model and files of examples to the folder
of another Hugging Face model.

    deepspeed finetune.py --model Qwen2.5-0.5B --data alpaca.json --output tuned

    torchrun --nproc_per_node 8 finetune.py --model Llama-3.1-8B --data chats.jsonl --output tuned \
        --tensor-model-parallel-size 2 --zero-stage 1 --bf16 --packing --epochs 2 --lr 1e-5

The loss counts the answers alone. The same command continues a run that was interrupted, bitwise.
Every flag of pretrain_gpt.py can be given too.
"""

import megatron.util.collector
from megatron.apps.finetune.command import fine_tune, parse
from megatron.apps.finetune.settings import errors_in_own_flags
from megatron.run.process import ending_process, errors_for_users

megatron.util.collector.resume()


def main() -> None:
    """Parses the command line, trains, writes the model."""
    with ending_process(), errors_for_users(), errors_in_own_flags():
        fine_tune(parse(__doc__))


if __name__ == "__main__":
    main()
