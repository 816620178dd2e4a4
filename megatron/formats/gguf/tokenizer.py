"""The tokenizer in a GGUF file's metadata. It is read by transformers' own conversion. Byte-level
BPE and SentencePiece's BPE can be written.

Files contain the name of the pattern that splits texts (``tokenizer.ggml.pre``), not the pattern
itself. Instead of SentencePiece's merges they contain a score for each token; the highest score
merges first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.formats.generation_settings import Generation, with_ends
from megatron.formats.tokenizer_json import check_number_added, check_pieces
from megatron.formats.transformers_folder import load_folder
from megatron.util.errors import rust_errors

_GGML = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
"""Token types (gguf.TokenType)."""
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id",
          "pad": "padding_token_id"}  # fmt: skip
_OF_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
"""Names under which models use GPT-2's splitting pattern."""
_SPACED = ("gemma", "gemma2", "gemma3", "phi3")
"""Architectures for which transformers' conversion adds no space before a text."""
_SAMPLES = ("The 3 7 59 na\u00efve: def f(x):\n\treturn \u6771\u4eac  1024\n", "I'LL it's", "a  b")


def end_of_text(metadata: Mapping[str, Any], rows: int, where: Path) -> Generation:
    """Return generation settings with the end-of-text token. Raises CheckpointError if it is not
    one of the model's ``rows`` tokens."""
    end = metadata.get(f"{_GGML}eos_token_id")
    if end is None:
        return {}
    if type(end) is not int or not 0 <= end < rows:
        raise CheckpointError(
            f"{where}: {_GGML}eos_token_id is {end!r:.100}, which is not a token of the model, "
            f"whose ids are 0 to {rows - 1}"
        )
    return with_ends({}, [end])


def save_tokenizer(metadata: Mapping[str, Any], target: Path, rows: int, where: Path) -> bool:
    """Write the tokenizer in a file's metadata to a new folder, in Hugging Face's format. Return
    False if there is no tokenizer, or if its splitting pattern is unknown. Raises CheckpointError
    if the tokenizer is malformed, or has more tokens than the model."""
    content = {
        key.removeprefix(_GGML): value for key, value in metadata.items() if key.startswith(_GGML)
    }
    architecture = metadata.get("general.architecture")
    if not _is_known(content, architecture):
        return False
    try:
        tokens = _check(content)
        if len(tokens) > rows:
            raise ValueError(f"{len(tokens):,} tokens, but the token embedding has {rows:,} rows")
        with rust_errors("the library cannot read it"):
            tokenizer = _built(content, str(architecture), metadata.get("tokenizer.chat_template"))
            tokenizer.save_pretrained(target)
    except Exception as error:  # transformers raises errors of many types
        reason = " ".join(str(error).split())[:500]
        raise CheckpointError(f"{where}: its tokenizer (tokenizer.ggml): {reason}") from None
    return True


def _is_known(content: Mapping[str, Any], architecture: Any) -> bool:
    kind, pre = content.get("model"), content.get("pre", _OF_GPT2[0])
    if kind == "gpt2":
        return pre in _OF_GPT2 or pre in _splits()
    adds_space = content.get("add_space_prefix", True)
    return kind == "llama" and (adds_space is True or architecture in _SPACED)


def _splits() -> Mapping[str, str]:
    """Return the splitting patterns that transformers knows, by name."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GGUF_PRE_TOKENIZER_SPLITS


def _check(content: Mapping[str, Any]) -> list[str]:
    """Return the tokens. Raises ValueError if a list has the wrong element type or length, or if
    the content would take the library too long to process."""
    tokens = content.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("tokens must be a list of texts")
    check_pieces(tokens, "a token")
    for name, kind in (("scores", float), ("token_type", int)):
        values = content.get(name, [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ValueError(f"{name} must be a list of numbers")
        if name in content and len(values) != len(tokens):
            raise ValueError(f"{name} has {len(values):,} elements for {len(tokens):,} tokens")
    check_number_added(sum(t in (_CONTROL, _USER) for t in content.get("token_type", [])), "it")
    merges = content.get("merges", [])
    if not isinstance(merges, list) or not all(
        isinstance(merge, str) and merge.count(" ") == 1 for merge in merges
    ):
        raise ValueError("merges must be a list of pairs")
    if content["model"] == "gpt2" and "merges" not in content:
        raise ValueError("it has no merges")
    for key in _ROLES.values():
        token = content.get(key, 0)
        if type(token) is not int or not 0 <= token < len(tokens):
            raise ValueError(f"{key} is {token!r:.100}, which is not one of {len(tokens):,} tokens")
    return tokens


def _built(content: Mapping[str, Any], architecture: str, template: Any) -> Any:
    """Return the tokenizer that `transformers` builds from GGUF metadata."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer

    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    known = {names.get(key, key): value for key, value in content.items()}
    backend, further = convert_gguf_tokenizer(architecture, known)
    special = {
        f"{role}_token": content["tokens"][content[key]]
        for role, key in _ROLES.items()
        if key in content
    }
    begins = content.get("add_bos_token", content["model"] == "llama")
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, **({"bos_token": None, "eos_token": None} | special), **further,
        add_bos_token=bool(begins), add_eos_token=bool(content.get("add_eos_token", False)),
    )  # fmt: skip
    if isinstance(template, str):
        made.chat_template = template
    return made


def tokenizer_metadata(
    source: Source, architecture: str, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return the metadata for a checkpoint's tokenizer. ``architecture`` is llama.cpp's name for
    the model. If there is no tokenizer, or GGUF cannot express it, report why and return
    nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tokenizer"
        if not source.copy_tokenizer(folder):
            progress(f"no tokenizer: {source.folder} has none")
            return {}
        tokenizer = load_folder(folder, "the tokenizer in")
        written = _written(tokenizer, source.model.vocabulary.size)
        try:
            if written is None:
                raise ValueError("GGUF has no name for the way in which it splits texts")
            back = _built(written, architecture, None)
            if any(back(text)["input_ids"] != tokenizer(text)["input_ids"] for text in _SAMPLES):
                raise ValueError("GGUF cannot say all of it: ids of texts would differ")
        except ValueError as error:
            progress(f"no tokenizer in the file: {error}")
            return {}
    keys = {f"{_GGML}{key}": value for key, value in written.items()}
    template = tokenizer.chat_template
    return keys | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _written(tokenizer: Any, rows: int) -> dict[str, Any] | None:
    """Return the metadata, without prefix, for a fast tokenizer and a model with ``rows`` tokens.
    Return None for unsupported kinds of tokenizers."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if content["model"]["type"] != "BPE":
        return None
    model, pre = content["model"], _pre(content.get("pre_tokenizer"))
    if pre is None and not model.get("byte_fallback"):
        return None
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [names.get(i, f"[PAD{i}]") for i in range(rows)]
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    types = [_UNUSED if i not in names else _NORMAL for i in range(rows)]
    for i, token in added.items():
        if i < rows:
            types[i] = _CONTROL if token.special else _USER
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    ids = {f"{role}": getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    keys: dict[str, Any] = {"model": "gpt2", "pre": pre} if pre else {"model": "llama"}
    keys |= {"tokens": tokens, "token_type": types}
    if pre:
        keys["merges"] = [" ".join(pair) for pair in merges]
    else:
        ranks = {"".join(pair): -float(n) for n, pair in reversed([*enumerate(merges)])}
        keys |= {"scores": [ranks.get(token, 0.0) for token in tokens], "pre": "default"}
        for i, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x"):
                types[i] = _BYTE
        if ids["unk"] is not None:
            types[ids["unk"]] = _UNKNOWN
    begins = tokenizer("a")["input_ids"][:1] == [ids["bos"]] and ids["bos"] is not None
    return keys | {"add_bos_token": begins, "add_eos_token": False} | {
        key: i for role, key in _ROLES.items() if (i := ids[role]) is not None and i < rows
    }  # fmt: skip


def _pre(step: Any) -> str | None:
    """Return GGUF's name for the pattern that splits texts before bytes are merged. Return None if
    the pattern has no name, or the tokenizer is not byte-level."""
    steps = step["pretokenizers"] if step and step["type"] == "Sequence" else [step]
    kinds = [each["type"] for each in steps if each]
    if kinds == ["ByteLevel"] and steps[0]["use_regex"] and not steps[0]["add_prefix_space"]:
        return _OF_GPT2[0]
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        pattern = steps[0]["pattern"].get("Regex")
        usual = ("llama-bpe", "qwen2", "gpt-4o", "tekken", *_splits())
        return next((name for name in usual if _splits()[name] == pattern), None)
    return None
