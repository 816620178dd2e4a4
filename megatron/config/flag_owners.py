"""Which program a flag belongs to, for messages about flags of another program."""

from __future__ import annotations

TRAINING = "pretrain_gpt.py"

OWN_FLAGS = {
    "tools/preprocess_data.py": """--input --output-prefix --json-key --json-keys --jsonl-keys
        --chunk-size --split-sentences --keep-newlines --keep-sequential-samples --partitions
        --sentence-splitter --lang --input-format""",
    "tools/generate.py": """--prompt --prompt-file --max-new-tokens --greedy --temperature --top-k
        --top-p --num-samples""",
    "tools/convert_checkpoint.py": """--architecture --push-to-hub --private --max-shard-size
        --release""",
    "tools/checkpoint/util.py": """--model-type --load-dir --save-dir --loader --saver
        --megatron-path --max-queue-size --true-vocab-size --target-tensor-parallel-size
        --target-pipeline-parallel-size --no-checking""",
    "tools/train_tokenizer.py": "--min-frequency --byte-fallback",
    "tools/analyze_data.py": "--analyzing-metric --analyzing-num-threads",
    "tools/check_parity.py": "--layouts",
    "tools/plan.py": "--gpus --gpus-per-node --gpu-memory --inter-node-bandwidth",
    "tools/show_batch.py": "--world-size",
}
"""Flags that people give to another program, by the program that has them."""


def another_program(flag: str, prog: str) -> str | None:
    """Says whose flag it is, if it belongs to a program other than ``prog``, which does not know
    it."""
    for program, flags in OWN_FLAGS.items():
        if flag in flags.split() and not program.endswith(prog):
            return f"a flag of {program}"
    return f"a flag of {TRAINING}" if flag in _training_flags() else None


def _training_flags() -> set[str]:
    from megatron.config.command_line import FlagParser  # needed for a message only
    from megatron.config.run import FLAG_CLASSES

    return set(FlagParser(*FLAG_CLASSES)._option_string_actions) - {"-h", "--help", "--version"}
