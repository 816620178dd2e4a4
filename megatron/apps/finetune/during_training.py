"""What a fine-tuning does besides training: a first evaluation, and answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.apps.finetune.prompts import Prompts
from megatron.apps.generation.execution.runner import step_group
from megatron.apps.generation.in_training import training_runner
from megatron.apps.generation.request import (
    Completion,
    GenerationRequest,
    Sampling,
    StopRules,
)
from megatron.apps.generation.writing import TextWriter
from megatron.parallel.mesh import Mesh
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer
from megatron.training.registry import WrittenText, WrittenTexts
from megatron.training.trainer import Callback, Trainer


class Baseline(Callback):
    """Evaluates the model as it is before the first step."""

    def before_step(self, trainer: Trainer) -> None:
        if trainer.iteration == 0:
            trainer.evaluate()


class SampleTexts(Callback):
    """Lets the model answer prompts at every evaluation, greedily."""

    def __init__(self, run: Run, mesh: Mesh, prompts: Prompts, most_tokens: int) -> None:
        self._tokenizer, self._mesh, self._prompts = run.tokenizer, mesh, prompts.prompts
        stopping = StopRules(most_tokens, prompts.ends)
        self._requests = [
            GenerationRequest(each.prompt, stopping, Sampling(greedy=True))
            for each in prompts.prompts
        ]
        self._longest = max((len(each.prompt) for each in prompts.prompts), default=0) + most_tokens
        self._ends = prompts.ends
        self._steps = step_group(mesh) if self._requests else None
        self._written_at: int | None = None

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        """Writes where an evaluation is due."""
        if last or trainer.plan.evaluates_after(trainer.iteration):
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not self._requests or self._written_at == trainer.iteration:
            return
        self._written_at = trainer.iteration
        trainer.settle()
        found = self._completions(trainer)
        texts = tuple(
            WrittenText(
                self._text(each.prompt, special=True),
                self._text(completion.tokens),
                self._text(each.reference),
                completion.finish == "stop",
            )
            for each, completion in zip(self._prompts, found, strict=True)
        )
        trainer.show(WrittenTexts(trainer.iteration, texts))

    def _completions(self, trainer: Trainer) -> list[Completion]:
        engine, tokenizer = trainer.engine, self._tokenizer
        count, longest = len(self._requests), self._longest
        with training_runner(engine, tokenizer, count, longest, self._steps) as runner:
            # At ZeRO 3 a pass of one replica needs the weights that the others have.
            writer = TextWriter(self._mesh, tokenizer, runner, together=engine.stage == 3)
            return writer.completions(self._requests)

    def _text(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens, without those that end an answer."""
        shown = [token for token in tokens if special or token not in self._ends]
        return _decoded(self._tokenizer, shown)


def _decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """A model may have more ids than its tokenizer."""
    return tokenizer.detokenize([token for token in tokens if token < tokenizer.vocab_size])
