"""Convert conversations to prompts with the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.apps.generation.request import Runner, prompt_tokens
from megatron.features.instruction.chat_process import (
    TemplateProcess,
    read_template,
    special_variables,
)
from megatron.tokenizer import Tokenizer
from megatron.util.json_text import parse_json

Message = Mapping[str, Any]
"""A chat message: a mapping with "role", "content" and any other keys that the template uses. All
values are JSON values."""

# Keys under which messages may contain the model's reasoning, in order of preference.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class ChatFormat:
    """Rules for rendering a conversation as a prompt.

    Attributes:
        templates: Jinja chat templates by name: "default", and "tool_use" if the tokenizer has a
            separate template for tools. Without templates, each turn is a paragraph with its role.
        variables: template variables, such as "bos_token".
        stops: texts that end an answer. Empty with templates, which use special tokens.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    _process: TemplateProcess = field(default_factory=lambda: TemplateProcess(), repr=False)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, folder: Path | None = None, template: str | None = None
    ) -> ChatFormat:
        """Return the format for a tokenizer. Uses ``template`` if given, otherwise the template of
        the `transformers` tokenizer, or, for other tokenizers, that in ``folder``
        (chat_template.jinja, tokenizer_config.json). Without any template, returns the plain
        format."""
        theirs: object
        if (inner := getattr(tokenizer, "transformers_tokenizer", None)) is not None:
            theirs, variables = inner.chat_template, special_variables(inner)
        else:
            theirs, variables = _of_folder(folder)
        templates = _by_name(template or theirs)
        return cls(templates, variables) if templates else cls(stops=("\nUser:",))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, as `transformers` renders it.
        ``add_generation_prompt`` appends the beginning of an answer. Raises ValueError if there are
        no messages, or if the template rejects them, does something forbidden, or exceeds its
        limits on time, memory or output."""
        if not messages:
            raise ValueError("a conversation needs a message at least")
        # Omit None values: templates would print them as text, or fail.
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if not self.templates:
            return _plain(present, add_generation_prompt)
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            known = ", ".join(sorted(self.templates))
            raise ValueError(f"the tokenizer has no default chat template; it has {known}")
        values = {
            **self.variables,
            "documents": None,
            **variables,
            "messages": [_with_reasoning(message) for message in present],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render(self.templates[name], values)

    def tokens(
        self, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any
    ) -> list[int]:
        """Return the token ids of a conversation. ``options`` are passed to :meth:`render`."""
        text = self.render(messages, **options)
        if self.templates:  # templates write the beginning-of-text token themselves
            return tokenizer.tokenize_sentences([text])[0].tolist()
        return tokenizer.tokenize(text)

    def prompt(
        self, tokenizer: Tokenizer, messages: Sequence[Message], runner: Runner
    ) -> tuple[int, ...]:
        """Return the prompt's token ids for a conversation that the model is to answer. If the
        model has an encoder, they are the encoder's input."""
        if runner.max_prompt is not None:
            return prompt_tokens(tokenizer, self.render(messages), runner)
        return tuple(self.tokens(tokenizer, messages))

    def close(self) -> None:
        """Stop the process that renders templates. The next :meth:`render` starts a new one."""
        self._process.close()


def _by_name(template: object) -> dict[str, str]:
    """Return the templates by name. tokenizer_config.json contains a single template, a list of
    named templates, or a mapping from names to templates."""
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, Mapping):
        return {str(name): str(text) for name, text in template.items()}
    if isinstance(template, list):
        named = [isinstance(each, Mapping) and {"name", "template"} <= {*each} for each in template]
        if not all(named):
            raise ValueError("the chat templates of the tokenizer lack a name or their text")
        return {str(each["name"]): str(each["template"]) for each in template}
    return {}


def _of_folder(folder: Path | None) -> tuple[object, dict[str, str]]:
    """Return the chat template and the special tokens from a tokenizer's files."""
    if folder is None:
        return None, {}
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings: Any = {}
    if config.is_file():
        settings = parse_json(config.read_bytes(), str(config), lenient=True)
    if not isinstance(settings, dict):
        raise ValueError(f"{config} is not a JSON object")
    template = settings.get("chat_template")
    if file.is_file():
        template = read_template(file, str(file))
    variables = {}
    for name, token in settings.items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            variables[name] = token
    return template, variables


def _with_reasoning(message: Message) -> Message:
    thought = next((message[name] for name in _REASONING if name in message), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def _plain(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    turns = []
    for message in messages:
        role, content = str(message.get("role", "user")), _text(message.get("content", ""))
        turns.append(content if role == "system" else f"{role.capitalize()}: {content}")
    if add_generation_prompt:
        turns.append("Assistant:")
    return "\n".join(turns) + ("" if add_generation_prompt else "\n")


def _text(content: object) -> str:
    """Return the text of a message's content, which is a string or a list of text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("this model reads text only; a message has content of another kind")
    return "".join(map(str, texts))
