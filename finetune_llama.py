# PYTHON_ARGCOMPLETE_OK
r"""Fine-tune a Llama on instructions and answers, with Megatron-DeepSpeed's flags.

    deepspeed finetune_llama.py --load llama-7b-mega-ds --finetune --data-path alpaca_data.json \
        --tokenizer-type HFTokenizer --tokenizer-model llama-2-7b-hf --split 100,0,0 \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --seq-length 512 \
        --micro-batch-size 16 --global-batch-size 256 --train-iters 3500 --lr 2e-5 --bf16

It is pretrain_gpt.py with other defaults: --sft --prompt-format alpaca, the model's values from
--load where no flag gives them, and --save LOAD-finetuned where there is a --save-interval alone.
"""

from megatron.config import FLAG_CLASSES, FlagParser, Setting, Settings
from megatron.families import family_of
from megatron.run.process import ending_process, errors_for_users
from megatron.run.run import run_of, show_configuration, start_processes
from megatron.training.build import train
from megatron.training.report import show_log

FAMILY = "gpt"


def completed(settings: Settings) -> Settings:
    """The settings with this program's defaults."""
    own = Setting(True, "this program")
    merged = {"family": Setting(FAMILY, "this program")} | settings
    if "preference" not in merged:
        merged = {"sft": own, "prompt_format": Setting("alpaca", "this program")} | merged
    if "load" in merged:
        merged.setdefault("use_checkpoint_args", own)
        if "save_interval" in merged and "save" not in merged:
            merged["save"] = Setting(f"{merged['load'].value}-finetuned", "this program")
    return merged


def main() -> None:
    """Parses the command line and trains."""
    with ending_process(), errors_for_users():
        hidden = family_of(FAMILY).unused_flags
        settings = FlagParser(*FLAG_CLASSES, description=__doc__, hidden=hidden).settings()
        show_log()
        settings = completed(settings)
        run = run_of(settings, start_processes(settings))
        show_configuration(run)
        train(run)


if __name__ == "__main__":
    main()
