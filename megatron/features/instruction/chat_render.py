"""Program that renders chat templates in its own process, so that a template cannot harm a server.

It reads JSON objects from standard input, one per line, with the template, its variables and the
maximum number of characters. For each it writes a line with the text and its marked ranges, or an
error. Its arguments are its memory limit in bytes, and the folders of the packages that it needs.
It does not import this project, which would take longer than rendering.

Templates run in jinja's immutable sandbox, with the functions, filters and tags that `transformers`
provides: raise_exception, strftime_now, dict, namespace, tojson, generation, break and continue.
"""

import json
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any


def main() -> None:
    memory, *folders = sys.argv[1:]
    sys.path += folders
    environment, marks = make_environment()
    from jinja2 import TemplateSyntaxError

    compiled = lru_cache(8)(environment.from_string)
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    for line in sys.stdin:
        task = json.loads(line)
        try:
            text = rendered(compiled, marks, **task)
            answer: dict[str, Any] = {"text": text, "marks": marks.found}
        except MemoryError:
            answer = {"error": "it takes too much memory"}
        except RefusalError as error:
            answer = {"refusal": str(error)[:500]}
        except TemplateSyntaxError as error:
            answer = {"syntax": f"line {error.lineno}: {str(error)[:500]}"}
        except Exception as error:  # a template can raise anything
            answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class RefusalError(Exception):
    """Raised by a template that rejects a conversation."""


class Marks:
    """Ranges of the text that {% generation %} encloses."""

    def __init__(self) -> None:
        self.written, self.found = 0, list[tuple[int, int]]()


def rendered(
    compiled: Callable[[str], Any], marks: Marks, template: str, variables: Any, most: int
) -> str:
    """Return the rendered text. Raises ValueError if it has more than ``most`` characters."""
    pieces: list[str] = []
    marks.written, marks.found = 0, []
    for piece in compiled(template).generate(**variables):
        marks.written += len(piece)
        if marks.written > most:
            raise ValueError(f"its text has more than {most:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def make_environment() -> tuple[Any, Marks]:
    """Return the environment for templates, and the marks, which are reset for each template."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    marks = Marks()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(marks), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=SafeDict(),
        namespace=_safe_namespace(),
    )
    return environment, marks


def _generation_tag(marks: Marks) -> type:
    """Return the jinja extension for {% generation %}, which records its content's range in
    ``marks``."""
    import jinja2
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            # Templates are rendered piece by piece, so all text before the tag has been counted.
            text = str(caller())
            marks.found.append((marks.written, marks.written + len(text)))
            return text

    return Generation


def _safe_namespace() -> type:
    """Return jinja's namespace without names that begin with an underscore, which could be used to
    escape from the sandbox."""
    import jinja2

    class SafeNamespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *given = args
            values = dict(*given, **kwargs)
            for name in values:
                SafeNamespace.check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            SafeNamespace.check(name)
            super().__setitem__(name, value)

        @staticmethod
        def check(name: object) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace has no attribute {name!r}")

    return SafeNamespace


class SafeDict:
    """`dict` as a template function, without its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _refuse(message: str) -> None:
    raise RefusalError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    main()
