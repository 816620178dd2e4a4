"""Parser that extracts the training command from a shell script without running it. It understands
assignments, arrays, arithmetic, default values of variables, simple conditions and here-documents.
Other lines are reported with their numbers."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from megatron.config import ConfigError

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?=)(.*)", re.DOTALL)
_VARIABLE = re.compile(
    rf"\$\(\((?P<sum>(?:(?!\$\(\().)*?)\)\)|\$\((?P<run>[^()]*)\)|`(?P<old>[^`]*)`"
    rf"|\$\{{(?P<name>{_NAME}|\d+|[@*])(?P<all>\[[@*]\])?(?::?[-=](?P<default>[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*))?\}}"
    rf"|\$(?P<plain>{_NAME}|\d+|[@*])",
    re.DOTALL,
)
_WORD = re.compile(
    r"(?:\$\(\((?:(?!\$\(\().)*?\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
    r"|\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.|[^\s\"'`$\\]|\$)+",
    re.DOTALL,
)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_PROGRAM = re.compile(r"(?:\S*/)?[\w.-]+\.py$")
_LAUNCHERS = re.compile(r"(?:\S*/)?(deepspeed|torchrun|python[\d.]*|accelerate|srun|ds)$")
_BLOCKS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
_DECLARE = ("export", "local", "readonly", "declare", "typeset")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    **dict.fromkeys(("-eq", "=="), lambda a, b: a == b),
    **dict.fromkeys(("-ne", "!="), lambda a, b: a != b),
    **dict.fromkeys(("-gt", ">"), lambda a, b: a > b),
    **dict.fromkeys(("-ge", ">="), lambda a, b: a >= b),
    **dict.fromkeys(("-lt", "<"), lambda a, b: a < b),
    **dict.fromkeys(("-le", "<="), lambda a, b: a <= b),
}


@dataclass
class Script:
    """A script's command, split up.

    Attributes:
        launcher: arguments before the program.
        program: path of the Python file.
        words: arguments after the program.
        files: contents of the files that the script writes with here-documents, by name.
        notes: lines that were not understood, with their numbers.
    """

    launcher: list[str] = field(default_factory=list)
    program: str = ""
    words: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_script(text: str, name: str, variables: Mapping[str, str]) -> Script:
    """Return the command of a script. ``variables`` contains the environment variables to use, and
    the script's positional arguments by number. Raises ConfigError if the script starts no Python
    program or several."""
    reader = _Reader(dict(variables), Script())
    reader.run(list(_statements(text)))
    if not reader.commands:
        raise ConfigError(
            f"{name}: no line of it starts a Python program with flags (deepspeed, torchrun or "
            "python FILE.py ...); give the script that does, or its command in a file"
        )
    if len(reader.commands) > 1:
        lines = ", ".join(f"{line} ({program})" for line, _, program, _ in reader.commands)
        raise ConfigError(
            f"{name} starts several programs, in lines {lines}: leave one of them in it"
        )
    _, reader.script.launcher, reader.script.program, reader.script.words = reader.commands[0]
    unknown = [word for word in reader.script.words if "$(" in word or "`" in word]
    for word in unknown:
        reader.script.notes.append(
            f"{word} is the output of a command, which is not run: write the value in"
        )
    return reader.script


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield statements with their line numbers. Continuation lines are joined, comments are
    removed, and here-documents are extracted."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first, statement = number, lines[number]
        number += 1
        while number < len(lines) and _is_open(statement):
            joined = statement[:-1] + " " if statement.endswith("\\") else statement + "\n"
            statement = joined + lines[number]
            number += 1
        heredoc = _HEREDOC.search(statement)
        if heredoc and "<<<" not in statement:
            body = []
            while number < len(lines) and lines[number].strip() != heredoc[2]:
                body.append(lines[number])
                number += 1
            number += 1
            target = re.search(r">\s*(\S+)", statement)
            yield (
                first + 1,
                f"\0{int(bool(heredoc[1]))}{target[1] if target else ''}\0" + "\n".join(body),
            )
            continue
        for part in _split(_uncommented(statement)):
            yield first + 1, part


def _is_open(statement: str) -> bool:
    """Return whether a statement continues on the next line, because of a backslash, an open quote
    or an open array."""
    clean = _uncommented(statement)
    if clean.rstrip(" ").endswith("\\"):
        return not clean.rstrip(" ").endswith("\\\\")
    depth, quote = 0, ""
    for index, sign in enumerate(clean):
        if quote:
            quote = "" if sign == quote and (quote == "'" or clean[index - 1] != "\\") else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "(" and (depth or clean[max(0, index - 1)] == "="):
            depth += 1
        elif sign == ")" and depth:
            depth -= 1
    return bool(quote or depth)


def _uncommented(statement: str) -> str:
    """Remove comments, which begin with # at the start of a word."""
    lines, quote = [], ""
    for line in statement.split("\n"):
        kept = line
        for index, sign in enumerate(line):
            if quote:
                quote = "" if sign == quote else quote
            elif sign in "'\"":
                quote = sign
            elif sign == "#" and (index == 0 or line[index - 1] in " \t(;"):
                kept = line[:index]
                break
        lines.append(kept)
    return "\n".join(lines)


def _split(statement: str) -> Iterator[str]:
    """Split a statement at semicolons and &&, except within quotes and parentheses."""
    part, quote, depth = "", "", 0
    pieces = re.split(r"(;;|;|&&|\|\||['\"()]|\[\[|\]\])", statement)
    for piece in pieces:
        if quote:
            quote = "" if piece == quote else quote
        elif piece in ("'", '"'):
            quote = piece
        elif piece in ("(", "[["):
            depth += 1
        elif piece in (")", "]]"):
            depth -= 1
        elif piece in (";", ";;", "&&") and depth <= 0:
            if part.strip():
                yield part.strip()
            part = ""
            continue
        part += piece
    if part.strip():
        yield part.strip()


class _Reader:
    def __init__(self, variables: dict[str, str], script: Script) -> None:
        self.values: dict[str, list[str]] = {name: [text] for name, text in variables.items()}
        self.fixed = {name for name in variables if not name.isdigit()}
        self.script = script
        self.commands: list[tuple[int, list[str], str, list[str]]] = []

    def run(self, statements: list[tuple[int, str]]) -> None:
        """Read statements in order. Blocks whose condition is not understood are skipped."""
        index = 0
        while index < len(statements):
            line, text = statements[index]
            word = text.split(None, 1)[0] if text.split() else ""
            if word in _BLOCKS:
                end = self._end(statements, index)
                if word == "if":
                    self._branches(statements[index:end])
                else:
                    self._note(line, text, f"what is between it and {_BLOCKS[word]} is not read")
                index = end + 1
                continue
            self._statement(line, text)
            index += 1

    @staticmethod
    def _end(statements: list[tuple[int, str]], start: int) -> int:
        depth = 0
        for index in range(start, len(statements)):
            for word in re.findall(r"(?:^|\bthen |\bdo |\belse )(\w+)", statements[index][1]):
                depth += (word in _BLOCKS) - (word in _BLOCKS.values())
            if depth == 0:
                return index
        return len(statements)

    def _branches(self, block: list[tuple[int, str]]) -> None:
        """Read the branch of an if statement that its condition selects."""
        depth, taken, chosen = 0, False, list[tuple[int, str]]()
        active = False
        for line, text in block:
            word, _, rest = text.partition(" ")
            if depth == 0 and word in ("if", "elif") or (depth == 1 and word == "elif"):
                depth = 1
                verdict = False if taken else self._condition(rest)
                if verdict is None:
                    self._note(
                        line, text, "the condition cannot be read here, and neither branch is"
                    )
                    return
                active = verdict and not taken
                taken = taken or verdict
                continue
            if depth == 1 and word == "else":
                active, text = not taken, rest
            if depth == 1 and word == "then":
                text = rest
            depth += (word in _BLOCKS) - (word in _BLOCKS.values())
            if active and text.strip():
                chosen.append((line, text.strip()))
        self.run(chosen)

    def _condition(self, text: str) -> bool | None:
        match = re.fullmatch(r"\[\[?(.*?)\]\]?", text.strip(), re.DOTALL)
        if match is None:
            match = re.fullmatch(r"\(\((.*)\)\)", text.strip(), re.DOTALL)
            if match is None:
                return None
        parts = re.split(r"\s(&&|\|\||-a|-o)\s", match[1].strip())
        verdicts = [self._test(part.strip()) for part in parts[::2]]
        if None in verdicts:
            return None
        result = bool(verdicts[0])
        for sign, verdict in zip(parts[1::2], verdicts[1:], strict=True):
            result = result and bool(verdict) if sign in ("&&", "-a") else result or bool(verdict)
        return result

    def _test(self, text: str) -> bool | None:
        if text.startswith("! "):
            verdict = self._test(text[2:].strip())
            return None if verdict is None else not verdict
        try:
            words = shlex.split(self._expanded(text.replace('""', "''")), posix=True)
        except ValueError:
            return None
        quoted = self._expanded(text)
        if re.match(r"-[zn]\s", text):
            empty = not quoted[2:].strip().strip("\"'")
            return empty if text[1] == "z" else not empty
        match = re.search(r"-\w\w|[=!<>]=?", quoted)
        if match is None:
            return None if len(words) > 1 or text.startswith("-") else bool(words)
        sign, sides = match[0], (quoted[: match.start()], quoted[match.end() :])
        left, right = (part.strip().strip("\"'") for part in sides)
        try:
            return _SIGNS[sign](float(left), float(right))
        except (ValueError, KeyError):
            equal = left == right
            return {"=": equal, "==": equal, "!=": not equal}.get(sign)

    def _statement(self, line: int, text: str) -> None:
        if text.startswith("\0"):
            _, head, body = text.split("\0", 2)
            name = self._expanded(head[1:]).strip("\"'")
            self.script.files[name] = body if head[0] == "1" else self._expanded(body)
            return
        words = text.split()
        if words[0] in _DECLARE:
            words = [word for word in words[1:] if not word.startswith("-")]
            text = text.split(None, 1)[1] if len(words) else ""
        match = _ASSIGNMENT.match(text)
        if match and match[3].startswith("("):
            added = self._words(match[3].strip()[1:-1])
            self._assign(match[1], match[2], added)
            return
        parts = self._raw_words(text)
        while parts and (match := _ASSIGNMENT.fullmatch(parts[0])):
            self._assign(match[1], match[2], [self._unquoted(match[3])])
            parts.pop(0)
        if parts:
            self._command(line, text, parts)

    def _assign(self, name: str, sign: str, words: list[str]) -> None:
        if name in self.fixed:
            return
        if sign == "=":
            self.values[name] = words
        elif len(words) == 1 and len(self.values.get(name, [""])) == 1:
            self.values[name] = [self.values.get(name, [""])[0] + words[0]]
        else:
            self.values[name] = self.values.get(name, []) + words

    def _command(self, line: int, text: str, parts: list[str]) -> None:
        words = [word for part in parts for word in self._words(part)]
        if not words:
            return
        if words[0] == "eval" or re.search(r"(?:^|/)(?:ba)?sh$", words[0]) and "-c" in words:
            words = shlex.split(
                " ".join(words[1:] if words[0] == "eval" else words[words.index("-c") + 1 :])
            )
        elif "-c" in words[1:] and any(re.search(r"(?:^|/)(?:ba)?sh$", word) for word in words):
            words = shlex.split(" ".join(words[words.index("-c") + 1 :]))
        if words and words[0] in ("source", "."):
            self._note(line, text, "the file is not read; what it sets is missing")
            return
        if words and words[0] == "sed" and ">" in words:
            self._note(line, text, f"it is not run: give {words[-1]} as it is when the run starts")
            return
        program = next((i for i, word in enumerate(words) if _PROGRAM.match(word)), None)
        if program is None or not any(_LAUNCHERS.match(w) for w in words[: program or 1]):
            return
        flags = words[program + 1 :]
        if not any(word.startswith("-") for word in flags) and len(flags) != 1:
            return  # a helper program, not the training
        for index, word in enumerate(flags):
            if re.match(r"(\d|&)?>|\|", word) or word in ("&", "2>&1"):
                flags = flags[:index]
                break
        self.commands.append((line, words[:program], words[program], flags))

    def _note(self, line: int, text: str, why: str) -> None:
        self.script.notes.append(f"line {line}, {' '.join(text.split())[:60]}: {why}")

    @staticmethod
    def _raw_words(text: str) -> list[str]:
        """Split a statement into words, keeping their quotes and variables."""
        return _WORD.findall(text)

    def _words(self, text: str) -> list[str]:
        """Return the words to which text expands. Arrays and unquoted variables may be several."""
        result: list[str] = []
        for raw in self._raw_words(text):
            array = re.fullmatch(rf"\"?\$\{{({_NAME}|[@*])\[?[@*]?\]?\}}\"?", raw)
            values = self.values.get(array[1]) if array and ("[" in raw) else None
            if raw in ('"$@"', "$@", "$*", "${@}", '"${@}"'):
                values = [
                    v for n in sorted(self.values, key=str) if n.isdigit() for v in self.values[n]
                ]
            if values is not None:
                result += [
                    word for value in values for word in ([value] if '"' in raw else value.split())
                ]
            elif raw[0] in "\"'" and raw[-1] == raw[0]:
                result.append(self._unquoted(raw))
            elif "$" in raw or "`" in raw:
                text = self._unquoted(raw)
                result += [text] if "$(" in text or "`" in text else _shell_words(text)
            else:
                result.append(self._unquoted(raw))
        return result

    def _unquoted(self, raw: str) -> str:
        parts = re.findall(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?:[^'\"\\]|\\.)+", raw, re.DOTALL)
        out = ""
        for part in parts:
            if part.startswith("'"):
                out += part[1:-1]
            elif part.startswith('"'):
                out += self._expanded(
                    re.sub(r"\\([\"\\$`])", r"\1", part[1:-1].replace("\\\n", ""))
                )
            else:
                out += self._expanded(part)
        return out

    def _expanded(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            if match["sum"] is not None:
                return _arithmetic(self._expanded(match["sum"]), self.values)
            if match["run"] is not None or match["old"] is not None:
                return match[0]
            known = self.values.get(match["name"] or match["plain"] or "")
            if known and (known != [""] or match["default"] is None):
                return " ".join(known)
            return self._expanded(match["default"].strip("\"'")) if match["default"] else ""

        return _VARIABLE.sub(value, text)


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _arithmetic(text: str, values: Mapping[str, list[str]]) -> str:
    """Evaluate $((...)) with integers, + - * / % and parentheses. Return the text unchanged if this
    is not possible."""
    named = re.sub(_NAME, lambda name: (values.get(name[0]) or ["0"])[0] or "0", text).replace(
        " ", ""
    )
    if not re.fullmatch(r"[\d+*/%()-]{1,200}", named) or "**" in named:
        return f"$(({text}))"
    try:
        return str(_value(ast.parse(named.replace("/", "//"), mode="eval").body))
    except (SyntaxError, ZeroDivisionError, ValueError, TypeError):
        return f"$(({text}))"


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))
