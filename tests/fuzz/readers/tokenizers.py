"""Files of each kind of tokenizer, and chat templates."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from fuzz.fuzzer import Fuzzer
from small_tokenizers import PIECES, TEXTS, small_tokenizers

from megatron.apps.generation.decoding.chat import ChatFormat
from megatron.config import TokenizerConfig
from megatron.tokenizer import Tokenizer, build_tokenizer

PATHS = ("vocab_file", "merge_file", "tokenizer_model")
RANKS = "ranks.json"
SAMPLE = " ".join((*TEXTS, *PIECES))


def files(name: str, *kept: str) -> Callable[[Path], None]:
    """Makes a small tokenizer, and keeps some of its files, or what is in its folder."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            source = Path(temporary)
            tokenizer = small_tokenizers(source)[name]()
            if not any((source / file).exists() for file in kept):
                tokenizer.save_pretrained(source)
            for file in kept:
                if file == RANKS:
                    write_ranks(folder / file, tokenizer)
                elif (source / file).is_dir():
                    shutil.copytree(source / file, folder, dirs_exist_ok=True)
                else:
                    shutil.copy(source / file, folder)

    return make


def write_ranks(path: Path, tokenizer: Tokenizer) -> None:
    """The tokens of a tokenizer in the JSON form of tiktoken's files."""
    tokens = [token for token in tokenizer.token_bytes if token != b"<|endoftext|>"]
    rows = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for n, token in enumerate(sorted(tokens, key=lambda token: (len(token), token)))
    ]
    path.write_text(json.dumps(rows))


def use(**flags: str) -> Callable[[Path], None]:
    """Builds a tokenizer, and asks it for all that programs ask."""

    def read(folder: Path) -> None:
        config = TokenizerConfig(
            **{
                name: str(folder / value) if name in PATHS else value
                for name, value in flags.items()
            }
        )
        tokenizer = build_tokenizer(config)
        ids = tokenizer.tokenize(SAMPLE)
        tokenizer.detokenize(ids)
        tokenizer.tokenize_batch(list(TEXTS))
        _ = tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.special_tokens

    return read


def write_template(folder: Path) -> None:
    files("hf_gpt2", "hf_gpt2")(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}\n{{ m['content'] | trim }}"
        "{% if loop.last and add_generation_prompt %}{{ bos_token }}{% endif %}{% endfor %}"
    )


def render(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    chat = ChatFormat({"default": text}, {"bos_token": "<s>"})
    try:
        chat.render([{"role": "user", "content": "Hello "}, {"role": "assistant", "content": "x"}])
    finally:
        chat.close()


PROCESS = frozenset(("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.kill"))

FUZZERS = (
    Fuzzer(
        "gpt2-vocabulary",
        files("gpt2", "vocab.json", "merges.txt"),
        use(tokenizer_type="GPT2BPETokenizer", vocab_file="vocab.json", merge_file="merges.txt"),
    ),
    Fuzzer(
        "wordpiece",
        files("wordpiece", "vocab.txt"),
        use(tokenizer_type="BertWordPieceCase", vocab_file="vocab.txt"),
    ),
    *(
        Fuzzer(
            f"sentencepiece-{name}",
            files(name, file),
            use(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=file),
        )
        for name, file in (("llama", "bpe.model"), ("unigram", "unigram.model"))
    ),
    Fuzzer(
        "tiktoken",
        files("ranks", "ranks.model"),
        use(tokenizer_type="Llama3Tokenizer", tokenizer_model="ranks.model"),
    ),
    Fuzzer(
        "tiktoken-json",
        files("gpt2", RANKS),
        use(tokenizer_type="TikTokenizer", tokenizer_model=RANKS, tiktoken_pattern="v1"),
    ),
    *(
        Fuzzer(
            f"huggingface-{name}",
            files(f"hf_{name}", f"hf_{name}"),
            use(tokenizer_type="HFTokenizer", tokenizer_model=""),
            heavy=True,
        )
        for name in ("gpt2", "llama", "unigram", "wordpiece")
    ),
    Fuzzer(
        "chat-template",
        write_template,
        render,
        names_file=False,
        may=PROCESS,
        seconds=15.0,
        heavy=True,
    ),
)
