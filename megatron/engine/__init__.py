"""DeepSpeed's engine: the only package that imports deepspeed."""

import os

import torch

# DeepSpeed looks for its accelerator when it is imported, and warns if it has to fall back.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
