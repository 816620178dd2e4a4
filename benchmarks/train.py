#!/usr/bin/env python
"""Time of this trainer's step, against its peers and against the matrix products alone.

    python benchmarks/train.py
    python benchmarks/train.py --vocab-size 8192 --rounds 9 --json out.json
    python benchmarks/train.py --contestants ours-zero1,ours-zero1+torch-compile,plain-compiled
    python benchmarks/train.py --architecture llama --layers 24 --hidden-size 2048 --heads 16 \
        --seq-length 2048 --one-at-a-time

Every contestant is a process of its own that starts from the same weights and reads the same
samples: it builds its model, warms up, and waits. In each round each makes its steps, in another
order every time, while the others wait. Times are those of the CPU (user and system time of the
process), or CUDA events where there is a GPU.
docs/evidence/benchmarks.md says what each contestant is.
"""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables, writes the JSON."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--contestant"]:
        from contestants.setting import Setting
        from contestants.worker import compete

        compete(argv[1], Setting.from_json(argv[2]))
    if argv[:1] == ["--prepare"]:
        from contestants.prepare import main as prepare

        prepare(*argv[1:])
        return 0
    from contestants.command import measure

    return measure(parser().parse_args(argv), ["python", "benchmarks/train.py", *argv])


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--layers", type=int, default=4, help="blocks of the model (4)")
    add("--hidden-size", type=int, default=256, help="its width (256)")
    add("--heads", type=int, default=4, help="query heads (4)")
    add("--kv-heads", type=int, help="key and value heads (as many; llama only)")
    add("--ffn-hidden-size", type=int, help="inner width of the MLP (the trainer's default)")
    add("--seq-length", type=int, default=256, help="tokens of a sample (256)")
    add("--vocab-size", type=int, default=50304, help="size of the vocabulary (50304)")
    add("--micro-batch", type=int, default=4, help="samples of a micro batch (4)")
    add("--micro-batches", type=int, default=1, help="micro batches of a step (1)")
    kinds = ("gpt2", "llama", "bert", "t5", "mixtral", "qwen3_moe")
    kinds += ("youtu", "qwen3_5_text", "bamba")
    add("--architecture", choices=kinds, default="gpt2", help="kind of model (gpt2)")
    add("--decoder-length", type=int, help="tokens of a t5's decoder (a quarter of the encoder's)")
    add("--experts", type=int, default=8, help="of a block of a mixtral or qwen3_moe (8)")
    add("--choices", type=int, default=2, help="experts of a token (2)")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="dtype (bf16)")
    add("--threads", type=int, default=1, help="threads of a process on a CPU (1)")
    add("--warmup", type=int, default=3, help="steps before anything is measured (3)")
    add("--rounds", type=int, default=5, help="rounds that are measured (5)")
    add("--steps", type=int, default=5, help="steps of a round (5)")
    add("--contestants", help="NAME,NAME,...; ours-zero1+FLAG+FLAG=VALUE adds flags (all)")
    add("--default-malloc", action="store_true", help="leave the peers' memory settings alone")
    add("--one-at-a-time", action="store_true", help="only one model is on the device at a time")
    hf = ("gelu_new", "gelu_pytorch_tanh")
    add("--hf-activation", choices=hf, default=hf[0], help="how transformers computes GPT-2's GELU")
    add("--own-weights", action="store_true", help="each draws its own initial weights")
    add("--peak-tflops", type=float, help="what the device can do (data sheet, or measured)")
    add("--timeout", type=float, default=1800, help="seconds for a start and for a round (1800)")
    add("--folder", type=Path, help="where the weights are written meanwhile (temporary)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return result


if __name__ == "__main__":
    sys.exit(main())
