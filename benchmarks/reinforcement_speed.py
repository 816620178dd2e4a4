#!/usr/bin/env python
"""CPU seconds and memory of a whole step of GRPO, of this trainer and of trl's GRPOTrainer.

    OMP_NUM_THREADS=1 python benchmarks/reinforcement_speed.py --repeats 3

Both start from one Llama in a folder of Hugging Face, with random weights, in float32. They write
the same number of texts after the same number of prompts in every step, score them by the same
function of Python, and train on them; no reference model. Runs of both alternate. A run is a
process, whose CPU seconds, with those of its children, are counted from the end of its second step;
memory is the largest of the process. Printed are tokens of texts a CPU second, and their ratio.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = "MEGATRON_REINFORCEMENT_SPEED"
REWARD = """
def letters(prompts, completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in texts]
"""
SKIPPED = 2
"""Steps before counting."""


class Count:
    """The CPU seconds and tokens of steps, and the most memory."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.tokens = steps, 0, 0
        self.begun = 0.0

    def step(self, tokens: int) -> None:
        """Count a step that has ended, with the tokens of its texts."""
        self.done += 1
        if self.done == SKIPPED:
            self.begun = seconds()
        elif self.done > SKIPPED:
            self.tokens += tokens
        if self.done == self.steps:
            used = seconds() - self.begun
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            print(json.dumps({"seconds": used, "tokens": self.tokens, "mib": most}), flush=True)


def seconds() -> float:
    """CPU seconds of this process and of its children."""
    import psutil

    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def files(folder: Path, options: argparse.Namespace) -> None:
    """Model, tokenizer, prompts and reward."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(3000)]
    lines = [" ".join(draw.choices(words, k=options.prompt)) for _ in range(400)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocabulary, special_tokens=["<eos>"], initial_alphabet=alphabet
    )
    bpe.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>", bos_token="<eos>"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 11 // 4,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 32,
            num_key_value_heads=options.hidden // 64,
            max_position_embeddings=1024,
            eos_token_id=0,
            bos_token_id=0,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
    )
    # A text ends at any of these: the lengths of texts differ, as those of a trained model do.
    ends = list(range(options.ends))
    model.generation_config.eos_token_id = ends if options.ends > 1 else 0
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": line}) + "\n" for line in lines)
    (folder / "reward.py").write_text(REWARD)


def ours(folder: Path, options: argparse.Namespace) -> None:
    """This trainer."""
    import megatron.util.collector
    from megatron.apps.reinforcement.start import Records
    from megatron.run.process import connected
    from megatron.run.run import parse_run
    from megatron.training.build import build_trainer
    from megatron.training.trainer import Callback

    megatron.util.collector.resume()
    count, written = Count(options.steps), [0]
    generated = Records.generated

    def seen(self: Any, episodes: Sequence[Any], *rest: Any) -> None:
        written[0] = sum(len(each.tokens_L) for each in episodes)
        generated(self, episodes, *rest)

    Records.generated = seen  # type: ignore[method-assign]

    class Counting(Callback):
        def after_step(self, trainer: Any, step: Any) -> None:
            count.step(written[0])

    texts, model = str(options.texts), str(folder / "model")
    argv = [
        *("--pretrained-checkpoint", model, "--use-checkpoint-args", "--tokenizer-model", model),
        *("--tokenizer-type", "HFTokenizer", "--seq-length", "512"),
        *("--data-path", str(folder / "prompts.jsonl"), "--split", "100,0,0"),
        *("--micro-batch-size", texts, "--global-batch-size", texts),
        *("--train-iters", str(options.steps), "--lr", "1e-6", "--lr-decay-style", "constant"),
        *("--rl", "grpo", "--num-generations", str(options.group), "--beta", "0"),
        *("--max-completion-length", str(options.length), "--rl-exact", "require"),
        *("--reward-funcs", f"{folder / 'reward.py'}:letters", "--eval-iters", "0"),
        *("--weight-decay", "0", "--log-interval", "1", "--peak-tflops", "1", "--num-workers", "0"),
        *("--rollout-batch-size", texts, "--clip-grad", "1.0", "--prompt-format", "plain"),
    ]
    run = parse_run(None, argv, family="gpt")
    with connected(run) as mesh:
        build_trainer(run, mesh, [Counting()]).fit()


def theirs(folder: Path, options: argparse.Namespace) -> None:
    """trl's GRPOTrainer."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    namespace: dict[str, Any] = {}
    exec(REWARD, namespace)
    count, written = Count(options.steps), [0]

    def letters(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        written[0] = sum(map(len, completion_ids))
        return namespace["letters"](prompts, completions)

    class Counting(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            count.step(written[0])

    config = GRPOConfig(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=options.texts,
        num_generations=options.group,
        max_completion_length=options.length,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=options.steps,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="sdpa", trust_remote_code=False
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=letters,
        args=config,
        train_dataset=load_dataset(
            "json", data_files=str(folder / "prompts.jsonl"), split="train",
            cache_dir=str(folder / "cache"), trust_remote_code=False,
        ),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False),
        callbacks=[Counting()],
    )  # fmt: skip
    trainer.train()


CONTESTANTS = {"ours": ours, "trl": theirs}


def main() -> None:
    """Run both in turn."""
    options = parser().parse_args()
    if WORKER in os.environ:
        CONTESTANTS[os.environ[WORKER]](Path(options.folder), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        files(Path(folder), options)
        rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        memory: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for _ in range(options.repeats):
            for name in CONTESTANTS:
                result = measured(name, folder)
                rates[name].append(result["tokens"] / result["seconds"])
                memory[name].append(result["mib"])
    print("| | tokens a CPU second | most memory, MiB |\n|---|---|---|")
    for name in CONTESTANTS:
        rate, most = statistics.median(rates[name]), statistics.median(memory[name])
        low, high = min(rates[name]), max(rates[name])
        print(f"| {name} | {rate:.0f} ({low:.0f} to {high:.0f}) | {most:.0f} |")
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def measured(name: str, folder: str) -> dict[str, float]:
    """The result of a run in a process."""
    environment = os.environ | {WORKER: name, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *sys.argv, "--folder", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if not lines:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(lines[-1])
    print(name, result, flush=True)
    return result


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--steps", type=int, default=6, help="of a run, the first two not counted")
    flags.add_argument("--texts", type=int, default=32, help="of a step")
    flags.add_argument("--group", type=int, default=8, help="texts after each prompt")
    flags.add_argument("--prompt", type=int, default=24, help="words of a prompt")
    flags.add_argument("--length", type=int, default=64, help="most tokens of a text")
    flags.add_argument("--ends", type=int, default=1, help="tokens that end a text")
    flags.add_argument("--hidden", type=int, default=256)
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--vocabulary", type=int, default=2000)
    flags.add_argument("--folder", help=argparse.SUPPRESS)
    return flags


if __name__ == "__main__":
    main()
