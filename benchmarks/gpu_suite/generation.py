"""Tokens per second of generation: this project's engine, and transformers' `generate`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "124M": {"layers": 12, "hidden_size": 768, "heads": 12, "vocab_size": 50_257},
    "tiny": {"layers": 1, "hidden_size": 64, "heads": 2, "vocab_size": 512},
}
"""GPT-2's shape, and one for a trial."""
MIXES = {"124M": (256, (16, 512), (16, 256)), "tiny": (8, (4, 24), (2, 6))}
"""Requests, and the least and most tokens of prompts and texts."""
CONCURRENCY = {"124M": (1, 16, 64), "tiny": (2, 4)}


def generation(size: str) -> dict[str, Any]:
    """A row for each program and number of requests at once, measured on the clock."""
    from generate import write_model
    from generating.load import Mix, counts
    from generating.ours import Ours
    from generating.transformers_static import Static
    from generating.worker import measure

    count, prompts, outputs = MIXES[size]
    rows = []
    with tempfile.TemporaryDirectory(prefix="generation-") as folder:
        write_model(Path(folder), argparse.Namespace(**SIZES[size]))
        most, longest = max(CONCURRENCY[size]), prompts[1] + outputs[1]
        for name, kind in (("ours", Ours), ("transformers' generate", Static)):
            program = kind(folder, torch.get_num_threads(), most, longest)
            for number, concurrency in enumerate(CONCURRENCY[size]):
                mix = Mix(min(count, 8 * concurrency), prompts, outputs, SIZES[size]["vocab_size"])
                measure(program, mix.requests(-1)[:concurrency], concurrency)
                requests = mix.requests(number)
                found = measure(program, requests, concurrency)
                rows.append(
                    {
                        "program": name,
                        "concurrency": concurrency,
                        "new_per_second": counts(requests)[1] / found["wall_seconds"],
                        "first_seconds": statistics.median(found["first_wall"]),
                    }
                )
            del program
    return {"size": size, "rows": rows}
