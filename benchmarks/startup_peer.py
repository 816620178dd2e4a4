"""The shortest training of `transformers` and stock DeepSpeed: what benchmarks/startup.py compares
with. It reads random tokens, saves at step 2 and continues from what it has saved."""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

try:
    from sitecustomize import phase  # benchmarks/startup_stamps.py
except ImportError:

    def phase(name):
        return nullcontext()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--local_rank", type=int)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--hidden-size", type=int, default=256)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--seq-length", type=int, default=256)
parser.add_argument("--micro-batch-size", type=int, default=2)
parser.add_argument("--vocab-size", type=int, default=50304)
parser.add_argument("--vocab-file")
parser.add_argument("--merge-file")
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--steps", type=int, default=100_000)
options = parser.parse_args()

import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast  # noqa: E402

for name, value in {
    "RANK": "0",
    "LOCAL_RANK": str(options.local_rank or 0),
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}.items():
    os.environ.setdefault(name, value)

# Stock DeepSpeed compiles this operator at its first start on a CPU: 30 seconds, not counted.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(
    "nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False, verbose=False
)
if options.vocab_file:
    with phase("tokenizer"):
        GPT2TokenizerFast(vocab=options.vocab_file, merges=options.merge_file)
with phase("model"):
    torch.manual_seed(1234)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=options.vocab_size,
            n_positions=options.seq_length,
            n_embd=options.hidden_size,
            n_layer=options.layers,
            n_head=options.heads,
            use_cache=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    config={
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    },
)
if (Path(options.checkpoints) / "latest").exists():
    with phase("checkpoint"):
        engine.load_checkpoint(options.checkpoints)
shape = (options.micro_batch_size, options.seq_length)
for step in range(1, options.steps + 1):
    with phase("step"):
        tokens_BS = torch.randint(options.vocab_size, shape, device=engine.device)
        loss = engine(input_ids=tokens_BS, labels=tokens_BS).loss
        engine.backward(loss)
        engine.step()
    if step == 2:
        engine.save_checkpoint(options.checkpoints)
