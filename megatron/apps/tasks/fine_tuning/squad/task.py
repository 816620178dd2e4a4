"""SQuAD as a task to fine-tune on: an encoder that finds where answers start and end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.fine_tuning.encoder import collator
from megatron.apps.tasks.fine_tuning.metrics import Scores
from megatron.apps.tasks.fine_tuning.predictions import Prediction
from megatron.apps.tasks.fine_tuning.squad.answers import AnswerSearch
from megatron.apps.tasks.fine_tuning.squad.metrics import squad2_metrics, squad_metrics
from megatron.apps.tasks.fine_tuning.squad.questions import Question, read_questions
from megatron.apps.tasks.fine_tuning.squad.windows import Window, WindowMaker
from megatron.apps.tasks.fine_tuning.task import (
    FineTuning,
    HeldOutSamples,
    Numbers,
    TaskRun,
    TrainingSamples,
)
from megatron.config import Setting, Settings
from megatron.data.labelled_text import collate_labelled
from megatron.data.samples import MadeSamples
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.util.files import write_whole


def _logits(seq_length: int, state: LayerState, batch: Any) -> Mapping[str, Tensor]:
    """Logits of start and end [B, S x 2], S being --seq-length whatever a batch is padded to."""
    logits_BS2 = state.hidden
    missing = seq_length - logits_BS2.shape[1]
    return {"logits": F.pad(logits_BS2, (0, 0, 0, missing)).flatten(1)}


@dataclass(frozen=True)
class Squad(FineTuning):
    """SQuAD 1.1 or, with questions that have no answer, 2.0."""

    task: TaskConfig

    name = "SQUAD"
    predictions_suffix = ".json"

    def settings(self) -> Settings:
        return {"head": Setting("span", f"task {self.name}")}

    def read(self, path: Path) -> list[Question]:
        return read_questions(path, self.task.version_2_with_negative)

    def training_samples(self, examples: Sequence[Question], run: TaskRun) -> TrainingSamples:
        windows = [window for each in self._maker(run).windows(examples) for window in each]
        return TrainingSamples(MadeSamples(windows, Window.row), collator(run))

    def held_out_samples(self, examples: Sequence[Question], run: TaskRun) -> HeldOutSamples:
        windows, length = self._maker(run).windows(examples), run.config.model.seq_length
        rows = [window for each in windows for window in each]
        samples = MadeSamples(rows, Window.row)

        def predictions(numbers: Numbers) -> list[Prediction]:
            logits_NS2 = numbers["logits"].reshape(len(rows), length, 2)
            return self._predictions(examples, windows, logits_NS2)

        return HeldOutSamples(
            samples,
            [window.length for window in rows],
            partial(collate_labelled, pad=run.tokenizer.pad),
            Measure(("logits",), partial(_logits, length), ends="logits", per_sample=True),
            predictions,
            samples,
        )

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        golds = [each.label for each in predictions]
        predicted = [str(each.predicted) for each in predictions]
        if self.task.version_2_with_negative:
            odds = [each.details["null_odds"] for each in predictions]
            found = squad2_metrics(golds, predicted, odds)
        else:
            found = squad_metrics(golds, predicted)
        return Scores({"f1": found["f1"], **found}, f"{json.dumps(found)},")

    def write_predictions(self, path: Path, sets: Mapping[str, Sequence[Prediction]]) -> None:
        """Writes what the official scripts read: the text of each question by its id, and beside it
        ``nbest_`` and, of version 2.0, ``null_odds_`` with the same name; with several sets, files
        of each."""
        for name, predictions in sets.items():
            own = path.with_stem(f"{path.stem}_{name}") if len(sets) > 1 else path
            _write(own, {each.identity: each.predicted for each in predictions})
            details = {"nbest": "n_best"}
            if self.task.version_2_with_negative:
                details["null_odds"] = "null_odds"
            for prefix, key in details.items():
                content = {each.identity: each.details[key] for each in predictions}
                _write(own.with_name(f"{prefix}_{own.name}"), content)

    def _maker(self, run: TaskRun) -> WindowMaker:
        task, length = self.task, run.config.model.seq_length
        return WindowMaker(run.tokenizer, length, task.doc_stride, task.max_query_length)

    def _predictions(
        self,
        questions: Sequence[Question],
        windows: Sequence[Sequence[Window]],
        logits_NS2: npt.NDArray[np.float64],
    ) -> list[Prediction]:
        task = self.task
        search = AnswerSearch(
            task.n_best_size,
            task.max_answer_length,
            task.version_2_with_negative,
            task.null_score_diff_threshold,
        )
        found, first = [], 0
        for question, rows in zip(questions, windows, strict=True):
            said = search.predict(rows, logits_NS2[first : first + len(rows)])
            first += len(rows)
            golds = [answer.text for answer in question.answers]
            details = {"n_best": said.n_best_entries(), "null_odds": said.null_odds}
            found.append(Prediction(question.identity, said.text, golds, details=details))
        return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=4, ensure_ascii=False)
    write_whole(path, f"{text}\n".encode())
