"""The page docs/evidence/conformance.md, made from the cases."""

from __future__ import annotations

from documented import DOCUMENTS, ROOT, SIZES, Case, all_cases, cases, variables

PAGE = ROOT / "docs" / "evidence" / "conformance.md"
HEADER = ("| case | command | result | replaced besides |", "| --- | --- | --- | --- |")


def page() -> str:
    """The whole page."""
    found = list(all_cases())
    same = [case for case in found if case.today]
    lines = [
        "# Documented commands",
        "",
        "The commands of the documents that Megatron's users learnt from, run word for word.",
        f"All {len(found)} pass. {len(same)} are compared with the same run in today's spelling:",
        "every loss, gradient norm and weight is the same, bit for bit.",
        "",
        "A test replaces sizes, counts and paths, and nothing else: the value of a listed flag, a",
        "launcher's port, or an environment variable that the document says to set. Where a",
        "document has texts scored by a service, `DETOXIFY_SCORER` names a local scorer. A script",
        "gets small sizes as flags behind it, of those it passes itself only. Every training",
        "command is also resolved at its own size and number of processes. The cases are in",
        "`tests/conformance/cases/`; this page is made from them:",
        "",
        "<!-- needs: minutes -->",
        "```sh",
        "MEGATRON_TEST_DATA=... pytest tests/conformance",
        "MEGATRON_REWRITE_DOCS=1 pytest tests/conformance/test_table.py",
        "```",
        "",
        "Small sizes, where a case has no others: "
        + ", ".join(f"`{flag} {value}`" for flag, value in SIZES.items())
        + ".",
    ]
    for document in DOCUMENTS:
        listed = cases(document)
        lines += ["", f"## {listed[0].title}", *definitions(document), "", *HEADER]
        lines += [row(case) for case in listed]
    return "\n".join(lines) + "\n"


def row(case: Case) -> str:
    """A case as a row of the table."""
    command = f"`{' '.join(case.documented.split())}`"
    cells = (case.name, command, result(case), replaced(case))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def result(case: Case) -> str:
    """What running a case showed."""
    if case.status:
        return f"refused, status {case.status}"
    return "passes, same as today's spelling" if case.today else "passes"


def replaced(case: Case) -> str:
    """What the test replaces of a command, without what all commands have in common."""
    words = [f"{flag} {size}" for flag, size in case.sizes.items()]
    words += [f"{placeholder} by {path}" for placeholder, path in case.paths.items()]
    words += [f"{name}={value}" for name, value in case.environment.items()]
    shown = [f"`{word}`" for word in words]
    shown += [f"`{case.stand_in}` by one that prints its words"] if case.stand_in else []
    return ", ".join(shown)


def definitions(document: str) -> list[str]:
    """The variables of a document that its commands name."""
    shown = " ".join(case.documented for case in cases(document))
    found, more = {}, True
    while more:
        named = [n for n in variables(document) if f"${n}" in shown and n not in found]
        more = bool(named)
        found |= {name: variables(document)[name] for name in named}
        shown += " ".join(found.values())
    lines = [f"- `${name}`: `{' '.join(text.split())}`" for name, text in found.items()]
    return ["", *lines] if lines else []
