"""The flags of 2019's ``scripts/run_gpt2_eval.py``, as those of ``tasks/main.py``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron.config import ConfigError
from megatron.config.flags import option


@dataclass(frozen=True)
class Gpt2EvalConfig:
    """Evaluation of a GPT-2."""

    model_path: str | None = option(None)
    """Folder of checkpoints, or of a Hugging Face GPT-2."""
    data_path: str | None = option(None)
    """Text to evaluate on."""
    cloze_eval: bool = option(False)
    """Accuracy on LAMBADA: JSON lines with "text"."""
    webtext_eval: bool = option(False)
    """Perplexity of a loose JSON file."""
    eval_iters: int = option(5000)
    """With --webtext-eval: the largest number of batches."""
    load_openai: bool = option(False)
    """--model-path is a folder of Hugging Face, whose sizes are those of the model."""
    num_layers: int | None = option(None, derived="12, or that of --load-openai")
    """Number of layers."""
    hidden_size: int | None = option(None, derived="768, or that of --load-openai")
    """Width of the hidden states."""
    num_attention_heads: int | None = option(None, derived="12, or that of --load-openai")
    """Number of attention heads."""
    batch_size: int = option(4)
    """Samples that are evaluated together."""
    model_parallel_size: int = option(1)
    """Processes among which the matrices of every layer are divided."""
    cache_dir: str = option("cache")
    """Folder of vocab.json and merges.txt of gpt2."""

    def check(self) -> None:
        """Raises ConfigError if a path is missing, or two tasks are asked for."""
        for name in ("model_path", "data_path"):
            if getattr(self, name) is None:
                raise ConfigError(f"--{name.replace('_', '-')} is missing")
        if self.cloze_eval and self.webtext_eval:
            raise ConfigError("--cloze-eval and --webtext-eval: give one of them")

    def task_flags(self) -> list[str]:
        """The words after tasks/main.py: 2019's length of 1,024, windows of 32 and float16."""
        task = ["WIKITEXT103", "--overlapping-eval", "32"]
        if self.cloze_eval:
            task = ["LAMBADA"]
        elif self.webtext_eval:
            task = ["RAW", "--eval-iters", str(self.eval_iters)]
        model = {
            "--valid-data": self.data_path,
            "--load": self.model_path,
            **self._sizes(),
            "--micro-batch-size": self.batch_size,
            "--tokenizer-type": "GPT2BPETokenizer",
            "--cache-dir": self.cache_dir,
        }
        words = [str(word) for pair in model.items() for word in pair]
        if self.model_parallel_size > 1:
            size = str(self.model_parallel_size)
            words += ["--tensor-model-parallel-size", size]
            # A launcher, where there is one, has started them.
            words += [] if "WORLD_SIZE" in os.environ else ["--num-gpus-per-node", size]
        words += ["--use-checkpoint-args"] * self.load_openai
        return ["--task", *task, *words, "--fp16", "--no-load-optim", "--no-load-rng"]

    def _sizes(self) -> dict[str, int]:
        given = {
            "--num-layers": self.num_layers,
            "--hidden-size": self.hidden_size,
            "--num-attention-heads": self.num_attention_heads,
        }
        sizes = {flag: size for flag, size in given.items() if size is not None}
        if self.load_openai:
            return sizes
        of_2019 = {"--num-layers": 12, "--hidden-size": 768, "--num-attention-heads": 12}
        return of_2019 | sizes | {"--seq-length": 1024, "--max-position-embeddings": 1024}
