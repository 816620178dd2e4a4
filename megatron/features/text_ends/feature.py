"""Feature that records a model's end-of-text tokens and generation settings in its checkpoints, as
far as the base model or the training examples define them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.config.features import Feature, taking_part


class TextEnds(Feature):
    def tokenizer_folder(self, run: Any, data: Any, origin: Any) -> Callable[[Path], object] | None:
        from megatron.formats import generation_settings as settings

        generation = settings.for_tokenizer(
            dict(origin.generation), origin.tokenizer, run.config.tokenizer, run.tokenizer
        )
        taught, train = None, data.datasets.train
        if data.weighed and train is not None:
            of_base = settings.ends_of(generation)
            known = (each.answer_ends(train, run.tokenizer, of_base) for each in taking_part())
            taught = next((ends for ends in known if ends is not None), None)
        if not generation and taught is None:
            return None
        return lambda folder: settings.write_of_run(folder, run.tokenizer, generation, taught)


FEATURE = TextEnds()
