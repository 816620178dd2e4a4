"""Flags for fine-tuning on instructions and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import PACKED, KindConfig
from megatron.config.flags import POSITIVE, option


@dataclass(frozen=True)
class InstructionConfig(KindConfig):
    """Instruction data: format of the examples, and tokens that count in the loss."""

    sft: bool = option(False)
    """Supervised fine-tuning: read the data paths as files of instructions and answers (JSON, JSON
    lines, Parquet, CSV, TSV), or folders or globs of such files, instead of prefixes of indexed
    datasets."""
    prompt_format: str = option(
        "auto",
        choices=("auto", "chat", "alpaca", "plain"),
        aliases=("--sft-tokenizer-prompt-format",),
        spellings={"default": "chat"},
    )
    """Format of instructions and answers: a chat template, Alpaca's headings, or plain text. auto
    uses plain text for prompt-completion pairs. For other examples it uses the chat template if
    there is one, and otherwise Alpaca's headings."""
    chat_template: str | None = option(None, derived="that of the tokenizer, if it has one")
    """File with the chat template (Jinja)."""
    loss_on: str = option("all", choices=("all", "last", "everything"))
    """Tokens that count in the loss: all answers, the last answer of each example, or everything.
    An answer includes its end token."""
    packing: bool = option(False, aliases=("--sft-sequence-packing",))
    """Pack several examples into a sample. Attention does not cross examples, and position ids
    restart with each example. Without this flag a sample is one example with padding."""
    on_long_example: str = option("truncate", choices=("truncate", "skip"))
    """Handling of examples of more than --seq-length plus one token."""
    sft_loss_weights: str = option(
        "micro-batches", choices=("micro-batches", "tokens", "examples"), role="results"
    )
    """Unit that counts equally in the loss of a step: the mean of each micro batch, as in Megatron;
    every token in the loss; or every example, regardless of the length of its answers. With tokens
    and examples, the loss does not depend on how a batch is split into micro batches."""
    sft_padding: str = option("longest", choices=("longest", "seq-length"))
    """Length to which samples are padded without --packing: the longest in a micro batch (with
    pipeline parallelism, in all micro batches of a step), or --seq-length."""
    neftune_noise_alpha: float | None = option(None, bounds=POSITIVE, role="results")
    """Add uniform noise to the token embeddings in training. Its magnitude is at most this value
    divided by sqrt(tokens of the example x hidden size) (NEFTune, Jain et al. 2023)."""
    log_token_accuracy: bool = option(False)
    """Also log the fraction of tokens in the loss that the model predicts correctly in training
    steps. Evaluations on instruction data always report it."""

    split_by: str = option("order", choices=("order", "prompt"))
    """How --split divides examples: in file order, or by a hash of the prompt. By prompt, all
    examples of a prompt are in the same split, so no evaluated prompt was trained on."""

    messages_column: str | None = option(None, derived="messages, conversations")
    """Column (key of a record) with the messages of a conversation."""
    prompt_column: str | None = option(None, derived="instruction, prompt, question, query")
    """Column with an instruction or question, or with the messages before an answer."""
    context_column: str | None = option(None, derived="input, context")
    """Column with the text that an instruction or question is about."""
    response_column: str | None = option(None, derived="output, response, completion, answer")
    """Column with the answer."""
    system_column: str | None = option(None, derived="system, system_prompt")
    """Column with a system message."""
    chosen_column: str | None = option(None, derived="chosen")
    """Column with the better answer of a preference."""
    rejected_column: str | None = option(None, derived="rejected")
    """Column with the worse answer of a preference."""
    label_column: str | None = option(None, derived="label, kto_tag")
    """Column that tells whether an answer is good (for kto)."""
    ignore_columns: tuple[str, ...] = option(())
    """Columns of records, and keys of messages, to ignore. Without this flag, an unknown key is an
    error."""

    files: ClassVar[str | None] = "instruction"
    samples: ClassVar[str] = PACKED
    idle: ClassVar[str] = (
        "this run has no instruction data (--sft, or the type instruction in the corpora file)"
    )

    @property
    def reads_all(self) -> bool:
        return self.sft

    @property
    def pads_batches(self) -> bool:
        """True if samples are padded only to the longest of their batch."""
        return not self.packing and self.sft_padding == "longest"

    @property
    def weigh_by(self) -> str:
        return self.sft_loss_weights

    @property
    def changes_steps(self) -> bool:
        """True if training steps compute more than the mean loss of each micro batch."""
        noise = self.neftune_noise_alpha is not None
        return noise or self.log_token_accuracy or self.sft_loss_weights != "micro-batches"
