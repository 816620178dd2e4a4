"""Reinforcement learning loop: generate completions, then run the steps that train on them.

Each replica of the model generates the completions of its own samples, on all of its ranks. If
replicas gather weights or experts from each other, all of them generate all completions in the same
passes. Afterwards every rank has the completions and rewards of all replicas.

Shapes: E completions of a generation, L tokens of a completion that the policy sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron.apps.generation.execution.runner import step_group
from megatron.apps.generation.writing import training_runner
from megatron.apps.reinforcement.advantages import Texts, all_equal, estimate
from megatron.apps.reinforcement.batches import Shapes, of_policy
from megatron.apps.reinforcement.completions import numbers_of
from megatron.apps.reinforcement.episodes import Episode, EpisodeBatch, Prompt
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.kept import KeptTexts, RatedText, Rollout
from megatron.apps.reinforcement.losses import divergence
from megatron.apps.reinforcement.objective import HeadNumbers, TokenRecord, token_records
from megatron.apps.reinforcement.rollout import Dialogue, Writing, WritingTask, write
from megatron.data.samples import RenumberedSamples, SampleDataset
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.mesh import Group
from megatron.tokenizer import Tokenizer
from megatron.training.stopping import TrainingStopped
from megatron.training.trainer import Callback, Trainer
from megatron.util.phases import phase

Floats = npt.NDArray[np.float64]
EXTRA = 2**40
"""First draw number of prompts that replace others (``--dynamic-sampling``)."""


class Observer(Protocol):
    """Object that is notified of every generation, on every rank."""

    def generated(self, episodes: Sequence[Episode], table: Any, rewards_E: Floats) -> None: ...


class SharedDialogue:
    """Dialogue for replicas that all generate the same completions in the same passes. The first
    replica talks to the environment and broadcasts its responses."""

    def __init__(self, dialogue: Dialogue | None, group: Group) -> None:
        self._dialogue, self._group = dialogue, group
        self.turns: list[Any] = []
        self.reward: float | None = None

    def answered(self, text: str, room: int) -> Sequence[int] | None:
        """See :class:`Dialogue`."""
        box: list[Any] = [None]
        if self._dialogue is not None:
            tokens = self._dialogue.answered(text, room)
            box = [(tokens, self._dialogue.turns, self._dialogue.reward)]
        dist.broadcast_object_list(box, self._group.ranks[0], group=self._group.handle)
        tokens, self.turns, self.reward = box[0]
        return tokens


class SeenAgain(RenumberedSamples[Any]):
    """Dataset that repeats the ``size`` samples of each generation ``passes`` times in a row."""

    def __init__(self, dataset: SampleDataset[Any], size: int, passes: int) -> None:
        super().__init__(dataset)
        self.size, self.passes = size, passes

    def __len__(self) -> int:
        return len(self.dataset) * self.passes

    def number(self, index: int) -> int:
        generation, place = divmod(index, self.size * self.passes)
        return generation * self.size + place % self.size


class ReinforcementLoop(Callback):
    """Callback that generates the completions of every step and builds its micro batches. The
    engine calls :meth:`look_ahead` before each step.

    Attributes:
        kept: state for checkpoints.
        fresh: True if the step's completions were generated with the weights that it starts from.
        numbers: metrics of the step's completions, for the log.
        prompts: the training samples.
        restore: function that restores the loop after a rollback, given the training samples.
    """

    def __init__(
        self,
        engine: TrainEngine,
        tokenizer: Tokenizer,
        writing: Writing,
        shapes: Shapes,
        prompts: SampleDataset[Any],
        scorer: Any,
        combine: Any,
        numbers: HeadNumbers,
        reference: Any = None,
        observers: Sequence[Observer] = (),
        begin_dialogue: Any = None,
        curriculum: Any = None,
        judge: Any = None,
    ) -> None:
        self._engine, self._tokenizer, self._writing = engine, tokenizer, writing
        self.options: ReinforcementConfig = writing.options
        self._shapes, self.prompts, self._scorer = shapes, prompts, scorer
        self._combine, self._numbers, self._reference = combine, numbers, reference
        self._observers, self._begin_dialogue = observers, begin_dialogue
        self._curriculum, self._judge = curriculum, judge
        self._mesh = engine.mesh
        self._steps = step_group(engine.mesh)
        experts = engine.mesh.group("expert").size > 1
        self._together = engine.mesh.samples.size > 1 and (engine.stage == 3 or experts)
        self.kept, self.fresh = KeptTexts(), False
        self.numbers: Mapping[str, float] = {}
        self.restore: Callable[[SampleDataset[Any]], None]
        self._waiting: deque[Any] = deque()
        self._trainer: Trainer | None = None

    def before_step(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def went_back(self, trainer: Trainer) -> None:
        self._waiting.clear()
        assert trainer.data.datasets.train is not None
        self.restore(trainer.data.datasets.train)

    def look_ahead(self, batches: Iterator[Any], count: int) -> Iterator[EpisodeBatch]:
        """Return the micro batches of the next step, generating completions first if needed. Raises
        TrainingStopped if the samples changed between steps on the same generation."""
        trainer = self._trainer
        assert trainer is not None, "a step outside of a training"
        number, place = divmod(trainer.iteration, self.options.steps_of_texts)
        several = self.options.steps_per_generation
        if not self._is_of(number, self._ahead(batches, count)):
            if place:
                raise TrainingStopped(
                    f"step {trainer.iteration + 1} has other samples than those whose texts are "
                    f"trained on for {self.options.steps_of_texts} steps: change --skip-samples "
                    "after the last of these"
                )
            self._generate(number, self._ahead(batches, several * count), trainer.iteration)
        self.fresh = self.kept.generations[number].iteration == trainer.iteration
        self.numbers = self.kept.generations[number].numbers
        if not place and self.options.steps_of_texts > 1:
            self._keep_old(number, self._ahead(batches, several * count))
        prompts = [self._next(batches) for _ in range(count)]
        last = place == self.options.steps_of_texts - 1
        if last and self.options.rl_staleness and trainer.iteration + 1 < trainer.plan.train_iters:
            done = trainer.consumed_samples + trainer.plan.batch_size.batch_size(
                trainer.consumed_samples
            )
            after = trainer.plan.batch_size.micro_batches(done)
            self._generate(number + 1, self._ahead(batches, several * after), trainer.iteration)
        generation = self.kept.generations[number]
        of_step = generation.steps(several)[place % several]
        if last:
            # Discard used generations now, because a checkpoint may be saved after this step.
            self.kept.without_old(number + 1)
        return iter(self.micro_batches(of_step, prompts))

    def _is_of(self, number: int, batches: Sequence[Any]) -> bool:
        """Return whether generation ``number`` exists and contains the samples of these micro
        batches."""
        kept = self.kept.generations.get(number)
        known = set() if kept is None else {text.number for text in kept.written_E}
        return known.issuperset(sample for batch in batches for sample in batch.numbers)

    def micro_batches(
        self, of_step: Sequence[RatedText], prompts: Sequence[Any]
    ) -> list[EpisodeBatch]:
        """Build this rank's micro batches of a step."""
        by_number = {text.number: text for text in of_step}
        own = [[by_number[number] for number in batch.numbers] for batch in prompts]
        tokens = {text.number: text.kept * int(text.episode.own_L.sum()) for text in of_step}
        mean = max(1, sum(tokens.values())) / (len(prompts) * self._mesh.samples.size)
        counts = [sum(tokens[text.number] for text in texts) for texts in own]
        return self._shapes.batches(own, [each / mean for each in counts])

    def _ahead(self, batches: Iterator[Any], count: int) -> list[Any]:
        """Return the next micro batches of prompts without consuming them."""
        while len(self._waiting) < count:
            self._waiting.append(next(batches))
        return list(islice(self._waiting, count))

    def _next(self, batches: Iterator[Any]) -> Any:
        return self._waiting.popleft() if self._waiting else next(batches)

    def _generate(self, number: int, batches: Sequence[Any], iteration: int) -> None:
        with phase("evaluation", "texts of the model"):
            self.kept.generations[number] = self._generated(number, batches, iteration)

    def _generated(self, number: int, batches: Sequence[Any], iteration: int) -> Rollout:
        own = {
            sample: prompt
            for batch in batches
            for sample, prompt in zip(batch.numbers, batch.prompts, strict=True)
        }
        group = self.options.num_generations or 1
        if self._curriculum is not None:
            own = {n: self._curriculum.prompt(n // group, prompt) for n, prompt in own.items()}
        samples = {sample: sample for sample in own}
        texts, table, rewards_E = self.written(own, samples)
        for _ in range(self.options.dynamic_sampling or 0):
            order = sorted(texts)
            groups_E = np.array(order) // group
            equal = all_equal(rewards_E, groups_E)
            if not equal.any():
                break
            # All ranks choose the same prompts: each group gets the next prompt from the end of the
            # data.
            for taken in dict.fromkeys(groups_E[equal].tolist()):
                self.kept.replaced += 1
                at = len(self.prompts) - self.kept.replaced * group
                prompt = self.prompts[at % len(self.prompts)].prompt
                for place in range(group):
                    sample = taken * group + place
                    if sample in own:
                        own[sample] = prompt
                        samples[sample] = EXTRA + self.kept.replaced * group + place
            again = {sample for sample, e in zip(order, equal, strict=True) if e}
            some = {sample: prompt for sample, prompt in own.items() if sample in again}
            replaced, new_table, new_E = self.written(some, samples)
            texts |= replaced
            rewards_E = rewards_E.copy()
            rewards_E[equal] = new_E
            table = _replaced_rows(table, equal, new_table)
        ordered = [texts[sample] for sample in sorted(texts)]
        for observer in self._observers:
            observer.generated(ordered, table, rewards_E)
        numbers = numbers_of(self.options, ordered, table, rewards_E)
        return Rollout(number, iteration, self._estimated(batches, texts, rewards_E), numbers)

    def written(
        self, prompts: dict[int, Prompt], samples: dict[int, int]
    ) -> tuple[dict[int, Episode], Any, Floats]:
        """Generate completions and their rewards. Return the completions of all replicas by sample,
        the reward table or None, and the rewards in sample order. Collective: every rank must call
        it.

        ``prompts`` are those of this replica, by sample. ``samples`` contains the numbers that seed
        the sampling."""
        own = list(prompts)
        asked = [(sample, prompts[sample], samples[sample]) for sample in own]
        if self._together:
            asked = [each for part in self._of_all(asked, self._mesh.samples) for each in part]
        tasks = self._tasks([(prompt, drawn) for _, prompt, drawn in asked])
        longest = max((len(task.prompt.tokens) for task in tasks), default=1)
        positions = longest + self.options.max_completion_length
        sequences = max(1, min(self.options.rollout_batch_size, len(tasks)))
        engine, steps = self._engine, self._steps
        episodes: Any = {}
        if tasks:
            with training_runner(engine, self._tokenizer, sequences, positions, steps) as runner:
                episodes = write(runner, self._tokenizer, tasks, self._writing)
        share = None
        if self._mesh.model.rank == 0:
            of_own = set(own)
            mine = {
                sample: episodes[place]
                for place, (sample, _, _) in enumerate(asked)
                if sample in of_own
            }
            scored = None if self._scorer is None else self._scorer.score(list(mine.values()))
            share = mine, scored
        shares = [each for each in self._of_all(share, self._mesh.world) if each is not None]
        texts = {sample: episode for mine, _ in shares for sample, episode in mine.items()}
        if self._scorer is None:
            return texts, None, np.zeros(len(texts))
        order = [sample for mine, _ in shares for sample in mine]
        places = np.argsort(order, kind="stable")
        judged = None
        if self._judge is not None:
            judged = self._judge.scores([texts[sample] for sample in sorted(texts)])
        table, rewards_E = self._combine([scored for _, scored in shares], places, judged)
        return texts, table, rewards_E

    def _tasks(self, asked: Sequence[tuple[Prompt, int]]) -> list[WritingTask]:
        """Return the generation tasks. With an environment, the prompts include its first messages,
        and only one rank communicates with it."""
        if self._begin_dialogue is None:
            return [WritingTask(prompt, number) for prompt, number in asked]
        mesh, share = self._mesh, None
        leads = mesh.model.rank == 0 and (mesh.samples.rank == 0 or not self._together)
        dialogues: list[Any] = [None] * len(asked)
        if leads:
            dialogues = [self._begin_dialogue(prompt) for prompt, _ in asked]
            share = mesh.samples.rank, [dialogue.prompt for dialogue in dialogues]
        prompts = dict(filter(None, self._of_all(share, mesh.world)))
        if self._together and mesh.model.rank == 0:
            dialogues = [SharedDialogue(each, mesh.samples) for each in dialogues]
        begun = prompts[0 if self._together else mesh.samples.rank]
        return [
            WritingTask(prompt, number, dialogue)
            for prompt, (_, number), dialogue in zip(begun, asked, dialogues, strict=True)
        ]

    def _of_all(self, own: Any, group: Any) -> list[Any]:
        """Gather objects from the ranks of a group, in rank order. Collective."""
        parts = [own]
        if group.size > 1:
            parts = [None] * group.size
            dist.all_gather_object(parts, own, group=group.handle)
        return parts

    def _estimated(
        self, batches: Sequence[Any], texts: dict[int, Episode], rewards_E: Floats
    ) -> list[RatedText]:
        """Return the completions with their advantages, in sample order."""
        options, order = self.options, sorted(texts)
        values = reference = None
        if options.has_values:
            rows = self._policy(batches, texts)
            values = [each.values_L for each in rows if each.values_L is not None]
        if self._reference is not None:
            reference = self._of_reference(batches, texts)
        episodes = [texts[sample] for sample in order]
        sampled = [each.log_probs_L[each.own_L].astype(np.float64) for each in episodes]
        divergences = None
        if reference is not None and options.kl_in == "reward":
            divergences = [
                _divergence(now, then, options.kl_estimator)
                for now, then in zip(sampled, reference, strict=True)
            ]
        result = estimate(
            Texts(
                rewards_E,
                np.array(order) // (options.num_generations or 1),
                np.array([each.own_L.sum() for each in episodes], np.int64),
                np.array([each.ended for each in episodes]),
                divergences,
                values,
            ),
            options,
        )
        return [
            RatedText(
                sample,
                episodes[place],
                result.advantages[place],
                None if result.returns is None else result.returns[place],
                None,
                None if reference is None else reference[place],
                None if values is None else values[place],
                bool(result.kept_E[place]),
            )
            for place, sample in enumerate(order)
        ]

    def _keep_old(self, number: int, batches: Sequence[Any]) -> None:
        """Store the log-probabilities of a generation's tokens under the weights before the first
        step on them."""
        generation = self.kept.generations[number]
        if self.fresh and self._shapes.padded is not None:
            # The log-probabilities from sampling are bitwise equal to these.
            old = [
                each.episode.log_probs_L[each.episode.own_L].astype(np.float64)
                for each in generation.written_E
            ]
        else:
            texts = {each.number: each.episode for each in generation.written_E}
            old = [each.log_probs_L for each in self._policy(batches, texts)]
        written = [
            replace(text, old_L=row) for text, row in zip(generation.written_E, old, strict=True)
        ]
        self.kept.generations[number] = replace(generation, written_E=written)

    def _policy(self, batches: Sequence[Any], texts: dict[int, Episode]) -> list[_TokenRows]:
        """Return log-probabilities and values under the current model, in sample order."""
        own = _bare(batches, texts)
        own_batches, values = self._shapes.batches(own), self.options.has_values
        records = token_records(
            self._engine, own_batches, self.options.temperature, values, self._numbers
        )
        rows = {
            text.number: row
            for batch, of_batch, record in zip(own_batches, own, records, strict=False)
            for text, row in zip(of_batch, _rows_of_texts(record, batch), strict=True)
        }
        return self._in_order(rows)

    def _of_reference(self, batches: Sequence[Any], texts: dict[int, Episode]) -> list[Floats]:
        """Return log-probabilities under the reference model, in sample order."""
        own = _bare(batches, texts)
        plain = self._shapes.plain(own)
        rows = {
            text.number: row
            for batch, of_batch, values_BS in zip(
                plain, own, self._reference.log_probs(plain), strict=False
            )
            for text, row in zip(of_batch, of_policy(values_BS, batch), strict=True)
        }
        return self._in_order(rows)

    def _in_order(self, rows: dict[int, Any]) -> list[Any]:
        """Gather rows from all ranks, and return them in sample order. Collective."""
        parts = self._of_all(rows if self._mesh.tensor.rank == 0 else {}, self._mesh.world)
        together = {sample: row for part in parts for sample, row in part.items()}
        return [together[sample] for sample in sorted(together)]


class _TokenRows(NamedTuple):
    """Log-probabilities and values of a completion's tokens, float64."""

    log_probs_L: Floats
    values_L: Floats | None


def _rows_of_texts(record: TokenRecord, batch: EpisodeBatch) -> list[_TokenRows]:
    log_probs = of_policy(record.log_probs_BS, batch)
    if record.values_BS is None:
        return [_TokenRows(row, None) for row in log_probs]
    return list(map(_TokenRows, log_probs, of_policy(record.values_BS, batch)))


def _bare(batches: Sequence[Any], texts: dict[int, Episode]) -> list[list[RatedText]]:
    """Return the completions for micro batches of prompts, with zero advantages as placeholders."""
    return [
        [
            RatedText(sample, texts[sample], np.zeros(int(texts[sample].own_L.sum())))
            for sample in batch.numbers
        ]
        for batch in batches
    ]


def _replaced_rows(table: Any, places: npt.NDArray[np.bool_], other: Any) -> Any:
    """Return a reward table with the selected rows replaced by the rows of ``other``."""
    if table is None:
        return None
    values_ER = table.values_ER.copy()
    values_ER[places] = other.values_ER
    return table._replace(values_ER=values_ER)


def _divergence(now_L: Floats, reference_L: Floats, estimator: str | None) -> Floats:
    """Estimate the divergence from the reference model at each token."""
    estimate_L = divergence(torch.from_numpy(now_L), torch.from_numpy(reference_L), estimator)
    result: Floats = estimate_L.numpy()
    return result
