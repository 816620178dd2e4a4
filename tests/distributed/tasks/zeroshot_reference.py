"""The zero-shot metrics from their definitions: plain transformers, one example at a time."""

import json
import math
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast


def log_probs(model, ids: list[int], last: int) -> torch.Tensor:
    """log p of each of the ``last`` tokens given all before it, [last, V]; float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, -last:]
    return logits.double().log_softmax(-1)


def window_sum(model, ids: list[int], length: int, stride: int) -> float:
    """Sum of log p over all tokens but the first, each in the first window that predicts it."""
    total, scored, start = 0.0, 0, 0
    while scored < len(ids) - 1:
        window = ids[start : start + length + 1]
        new = window[scored - start + 1 :]
        found = log_probs(model, window, len(new))
        total += sum(found[place, token].item() for place, token in enumerate(new))
        scored, start = scored + len(new), start + stride
    return total


def wikitext(model, tokenizer, raw: str, detokenized: str, length: int, stride: int) -> dict:
    """The metrics of WIKITEXT103 for a file and its text after the detokenizer."""
    ids = tokenizer(detokenized)["input_ids"]
    total = window_sum(model, ids, length, stride)
    loss, ratio = -total / (len(ids) - 1), (len(ids) - 1) / (len(raw.strip().split(" ")) - 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(20, loss)),
        "adjusted_perplexity": math.exp(min(20, loss * ratio)),
        "token_ratio": ratio,
        "bits_per_byte": -total / math.log(2) / len(raw.strip().encode()),
    }


def lambada(model, tokenizer, lines: list[str], strict: bool, longest: int) -> tuple[int, float]:
    """Examples whose label is the argmax at every place, and the sum of the labels' log p."""
    right, total = 0, 0.0
    for line in lines:
        text = json.loads(line)["text"]
        if strict:
            word = text.split()[-1]
            context = tokenizer(text[: text.rfind(word)].strip())["input_ids"]
            label = tokenizer(" " + word)["input_ids"]
        else:
            *context, last = tokenizer(text)["input_ids"]
            label = [last]
        ids = (context + label)[-(longest + 1) :]
        found = log_probs(model, ids, len(label))
        right += found.argmax(-1).tolist() == label
        total += sum(found[place, token].item() for place, token in enumerate(label))
    return right, total


def raw_json(model, tokenizer, lines: list[str], length: int, stride: int) -> float:
    """The loss of documents, each with the end-of-document token behind it."""
    ids = []
    for line in lines:
        ids += tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
    return -window_sum(model, ids, length, stride) / (len(ids) - 1)


def make_gpt2(folder: Path, texts: list[str], steps: int, files: Path | None = None, **shape):
    """A GPT-2 that was trained for some steps on the texts, and its tokenizer, with their files in
    ``folder``; the vocabulary is that of ``files``, or made of the texts."""
    folder.mkdir(exist_ok=True)
    if files is None:
        from tokenizers import ByteLevelBPETokenizer

        made = ByteLevelBPETokenizer()
        made.train_from_iterator(texts, 300, show_progress=False, special_tokens=["<|endoftext|>"])
        made.save_model(str(folder))
    else:
        for name in ("vocab.json", "merges.txt"):
            (folder / name).write_bytes((files / f"gpt2-{name}").read_bytes())
    tokenizer = GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=len(tokenizer), bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, **shape,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids = torch.tensor(tokenizer("\n".join(texts))["input_ids"])
    length = config.n_positions
    for step in range(steps):
        starts = (torch.arange(8) * 997 + step * 131) % (len(ids) - length)
        batch = torch.stack([ids[start : start + length] for start in starts])
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer
