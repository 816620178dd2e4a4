"""Fine-tuning on instructions and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.flags import option
from megatron.config.kinds import KindConfig


@dataclass(frozen=True)
class InstructionConfig(KindConfig):
    """Instruction data: what the examples look like to the model, and where the loss counts."""

    sft: bool = option(False)
    """The data paths name files of instructions and answers (JSON or JSON lines), or folders or
    globs of them, not prefixes of .bin/.idx."""
    prompt_format: str = option(
        "auto",
        choices=("auto", "chat", "alpaca", "plain"),
        aliases=("--sft-tokenizer-prompt-format",),
        spellings={"default": "chat"},
    )
    """Text around instructions and answers: a chat template, Alpaca's headings, or none. auto: the
    chat template where there is one, else Alpaca's headings; pairs of prompt and completion stay
    as they are."""
    chat_template: str | None = option(None, derived="that of the tokenizer, if it has one")
    """File with the chat template (Jinja)."""
    loss_on: str = option("all", choices=("all", "last", "everything"))
    """Tokens that count in the loss: all answers, the last answer of each example, or everything.
    The end of an answer belongs to it."""
    packing: bool = option(False, aliases=("--sft-sequence-packing",))
    """Put several examples into a sample; they do not attend to each other, and positions restart
    with each. Without it a sample is one example and padding."""
    on_long_example: str = option("truncate", choices=("truncate", "skip"))
    """What becomes of an example longer than --seq-length plus one token."""

    files: ClassVar[str | None] = "instruction"
    samples: ClassVar[str] = "packed"
    idle: ClassVar[str] = (
        "no data of this run are instructions (--sft, or the type instruction in the corpora file)"
    )

    @property
    def reads_all(self) -> bool:
        """See `KindConfig.reads_all`."""
        return self.sft
