"""Which language a text is in, by a model that lies in the package py3langid."""

from __future__ import annotations

from collections.abc import Callable

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from megatron.config import ConfigError

_ENOUGH = 4000
"""Characters that are looked at; more change nothing but the time."""


def language_finder() -> Callable[[str], str]:
    """Text to the code of its language (ISO 639-1 or -3); "zxx" where there are no words."""
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)

    def language_of(text: str) -> str:
        return identifier.classify(text[:_ENOUGH])[0]

    return language_of


def check_languages(codes: tuple[str, ...]) -> None:
    """Raises ConfigError where the model does not know a code of --lang."""
    known = set(LanguageIdentifier.from_model_file(MODEL_FILE).labels)
    for code in codes:
        if code not in known and code != "any":
            raise ConfigError(
                f"--lang {code} is not known; any, or codes among {' '.join(sorted(known))}"
            )
