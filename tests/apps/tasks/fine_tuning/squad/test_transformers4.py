"""SQuAD in transformers 4, which 5 no longer has: rows, predictions and metrics are the same.

pip install --no-deps --target tf4 transformers==4.57.1 huggingface_hub==0.36.0 tokenizers==0.22.1
MEGATRON_TEST_TRANSFORMERS4=tf4 pytest tests/apps/tasks/fine_tuning/squad/test_transformers4.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from squad_files import squad_content, write_squad

from megatron.apps.tasks.fine_tuning.squad import AnswerSearch, WindowMaker
from megatron.apps.tasks.fine_tuning.squad_files import read_questions, squad2_metrics

FOLDER = os.environ.get("MEGATRON_TEST_TRANSFORMERS4")
SEQ, STRIDE, QUERY, BEST, LONGEST = 48, 14, 12, 10, 12

# Features for training and evaluation, then predictions and scores from the given logits.
SCRIPT = """
import json, sys
import numpy as np
from pathlib import Path
from transformers import BertTokenizer
from transformers.data.metrics.squad_metrics import compute_predictions_logits, squad_evaluate
from transformers.data.processors import squad

folder, negative, seq, stride, query, best, longest = sys.argv[1], *map(int, sys.argv[2:])
processor = (squad.SquadV2Processor if negative else squad.SquadV1Processor)()
tokenizer = BertTokenizer(folder + "/vocab.txt", do_lower_case=True)
rows = []
for training in (True, False):
    read = processor.get_train_examples if training else processor.get_dev_examples
    examples = read(folder, "data.json")
    features = squad.squad_convert_examples_to_features(
        examples, tokenizer, seq, stride, query, training, tqdm_enabled=False
    )
    rows.append([
        [f.input_ids, f.token_type_ids, f.start_position, f.end_position,
         [f.token_is_max_context[i] for i in sorted(f.token_is_max_context)]]
        for f in features
    ])
logits = np.load(folder + "/logits.npy")
results = [
    squad.SquadResult(f.unique_id, logits[n, :, 0].tolist(), logits[n, :, 1].tolist())
    for n, f in enumerate(features)
]
files = [folder + "/" + name for name in ("predictions.json", "nbest.json", "odds.json")]
predictions = compute_predictions_logits(
    examples, features, results, best, longest, True, *files, False, bool(negative), 0.0, tokenizer
)
odds = json.loads(Path(files[2]).read_text()) if negative else None
scores = squad_evaluate(examples, predictions, odds)
Path(folder, "found.json").write_text(json.dumps({"rows": rows, "scores": scores}))
"""


@pytest.mark.proof
@pytest.mark.skipif(not FOLDER, reason="MEGATRON_TEST_TRANSFORMERS4 names no transformers 4")
@pytest.mark.parametrize("negative", [0.0, 0.4])
def test_the_same_as_transformers_4(tmp_path, whole, negative):
    content = squad_content(7, 8, 5, 70, negative)
    path = write_squad(tmp_path / "data.json", content)
    whole.save_pretrained(tmp_path)
    questions = read_questions(path, bool(negative))
    maker = WindowMaker(whole, SEQ, STRIDE, QUERY)
    windows = maker.windows(questions)
    rng = np.random.default_rng(1)
    count = sum(map(len, windows))
    logits = rng.normal(size=(count, SEQ, 2)).astype(np.float32) * 3
    logits[:, 0] += 7 * bool(negative)
    for window, row in zip(sum(windows, []), logits, strict=True):
        row[window.length :] -= 100  # their candidates may be padding
    np.save(tmp_path / "logits.npy", logits)
    environment = os.environ | {"PYTHONPATH": str(Path(FOLDER).resolve())}
    sizes = (int(negative > 0), SEQ, STRIDE, QUERY, BEST, LONGEST)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())

    training, evaluation = found["rows"]
    for window, row, seen in zip(sum(windows, []), training, evaluation, strict=True):
        tokens, types, start, end, best = row
        length = window.length
        (ours,), (kinds,), *_ = window.row()
        assert ours.tolist() == tokens[:length] and not any(tokens[length:])
        assert kinds.tolist() == types[:length]
        assert window.span == (start, end) and window.best_N.tolist() == best == seen[4]

    search = AnswerSearch(BEST, LONGEST, bool(negative))
    said, odds, first = {}, {}, 0
    their_best = json.loads((tmp_path / "nbest.json").read_text())
    for question, rows in zip(questions, windows, strict=True):
        prediction = search.predict(rows, logits[first : first + len(rows)])
        first += len(rows)
        said[question.identity], odds[question.identity] = prediction.text, prediction.null_odds
        entries = prediction.n_best_entries()
        for ours, theirs in zip(entries, their_best[question.identity], strict=True):
            assert " ".join(ours.pop("text").split()) == theirs.pop("text")
            assert ours == pytest.approx(theirs)
    theirs = json.loads((tmp_path / "predictions.json").read_text())
    assert {identity: " ".join(text.split()) for identity, text in said.items()} == theirs
    assert len(set(said.values())) > 10 and ("" in said.values()) == bool(negative)
    if negative:
        assert odds == json.loads((tmp_path / "odds.json").read_text())
    golds = [[answer.text for answer in question.answers] for question in questions]
    scores = squad2_metrics(golds, list(said.values()), list(odds.values()) if negative else None)
    assert scores == {name: found["scores"][name] for name in scores}
    assert not negative or "best_f1_thresh" in scores
