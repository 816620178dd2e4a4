"""Triton's kernels on a CPU, by its interpreter."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch


@contextmanager
def interpreted() -> Iterator[None]:
    """Within the context Triton's interpreter rounds as GPUs do. Skips the test where there is no
    triton, or no TRITON_INTERPRET=1 in the environment, which triton reads when it is imported.

    The interpreter cuts the bits of float32 numbers off. Here torch rounds them to the nearest, and
    numbers that are too large for 8 bits become the largest."""
    pytest.importorskip("triton", reason="needs triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 in the environment")
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    convert = interpreter._convert_float

    def rounded(data: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
        if source != tl.float32 or target not in kinds:
            return convert(data, source, target, mode)
        dtype = kinds[target]
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        if dtype.itemsize == 1:
            limit = torch.finfo(dtype).max
            return values.clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()
        return values.to(dtype).view(torch.int16).numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
