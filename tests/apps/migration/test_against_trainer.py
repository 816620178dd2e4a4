"""A command of transformers' Trainer and its translation, run: the losses of every step."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron.apps.migration.command import migrate

ROOT = Path(__file__).parents[3]
LENGTH, STEPS = 64, 12

TRAINER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer
from transformers import TrainerCallback, TrainingArguments
folder, file, *words = sys.argv[1:]
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
text = json.loads(open(file).readline())["text"]
ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
block = torch.tensor(ids[:65])

class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            print("LOSS", logs["loss"], logs["learning_rate"], flush=True)

model = AutoModelForCausalLM.from_pretrained(folder)
data = [{"input_ids": block, "labels": block}] * 8
Trainer(model, arguments, train_dataset=data, callbacks=[Log()]).train()
"""

SCRIPT = """
python run_clm.py --model_name_or_path base --train_file train.json --block_size 64 \\
  --output_dir out \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_steps 12 \\
  --learning_rate 1e-3 --lr_scheduler_type cosine --warmup_steps 3 --weight_decay 0.1 \\
  --adam_beta2 0.95 --max_grad_norm 1.0 --logging_steps 1 --save_strategy no --report_to none \\
  --seed 1
"""


@pytest.mark.proof
def test_losses_of_a_translated_run(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: number for number, sign in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        tmp_path / "base"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes, **heads)).save_pretrained(
        tmp_path / "base"
    )
    # One sample, again and again, so that the order of samples has no effect.
    unit = "A sample of sixty-four characters repeats, so its order is moot."
    (tmp_path / "train.json").write_text(json.dumps({"text": unit * 40}) + "\n")
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "trainer.py").write_text(TRAINER)
    words = SCRIPT.replace("\\", "").split()
    rest = words[words.index("--output_dir") :]
    theirs = _lines(
        [str(tmp_path / "trainer.py"), "base", "train.json", *rest, "--use_cpu"], tmp_path
    )
    expected = [float(match[1]) for match in re.finditer(r"LOSS (\S+)", theirs)]
    t = migrate([str(tmp_path / "run.sh")]).translation
    flags = [word for each in t.words.values() for word in each]
    more = ["--split", "100,0,0", "--num-workers", "0"]
    ours = _lines([str(ROOT / "pretrain_gpt.py"), *flags, *more], tmp_path)
    losses = [float(match[1]) for match in re.finditer(r"lm loss: (\S+)", ours)]
    assert len(expected) == STEPS
    assert losses == pytest.approx(expected, rel=2e-6)


def _lines(words, folder):
    run = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout + run.stderr
