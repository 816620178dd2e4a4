"""Conversations to prompts, by the chat template that a tokenizer comes with."""

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
"""A message with "role", "content" and other keys that a template reads; JSON values only."""

# Names of a model's thoughts before its answer; templates use the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class ChatFormat:
    """The form of a conversation's prompt.

    Attributes:
        templates: in jinja's language by name: "default", and "tool_use" where tools have their
            own. Without any, a turn is a paragraph that begins with its role.
        variables: of the templates, such as "bos_token".
        stops: texts that end an answer; templates use special tokens.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    _process: TemplateProcess = field(default_factory=lambda: TemplateProcess(), repr=False)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, folder: Path | None = None, template: str | None = None
    ) -> ChatFormat:
        """Return ``template``, or the template of the tokenizer or of its files in ``folder``
        (chat_template.jinja, tokenizer_config.json), or else the plain format."""
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
        """The text of a conversation, as `transformers` renders it; ``add_generation_prompt`` ends
        it with the beginning of an answer. Raises ValueError without messages, or if the template
        refuses them, is not allowed, or takes too much time, memory or text."""
        if not messages:
            raise ValueError("a conversation needs a message at least")
        # Templates write None as text, or fail.
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
        """The ids of a conversation; see :meth:`render`."""
        text = self.render(messages, **options)
        if self.templates:  # which write the token at the beginning of a text themselves
            return tokenizer.tokenize_sentences([text])[0].tolist()
        return tokenizer.tokenize(text)

    def prompt(
        self, tokenizer: Tokenizer, messages: Sequence[Message], runner: Runner
    ) -> tuple[int, ...]:
        """The ids of a conversation that a model answers, which an encoder may read."""
        if runner.max_prompt is not None:
            return prompt_tokens(tokenizer, self.render(messages), runner)
        return tuple(self.tokens(tokenizer, messages))

    def close(self) -> None:
        """Ends the process that renders templates; the next one starts another."""
        self._process.close()


def _by_name(template: object) -> dict[str, str]:
    """Templates as tokenizer_config.json has them: one, or a list, or several by name."""
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
    """Template and special tokens of the files of a tokenizer."""
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
    """A content is a text, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("this model reads text only; a message has content of another kind")
    return "".join(map(str, texts))
