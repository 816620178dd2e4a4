"""Hooks of mkdocs: pages that are generated from the code, figures, and links out of docs/.

Pages are written so that their links work in a checkout. Some files outside docs/ are pages of the
site too, notebooks as well; a link to any other file outside becomes its name.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
for folder in map(str, (ROOT, ROOT / "tests", ROOT / "tests/helpers", Path(__file__).parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from figures import figure, file_of  # noqa: E402
from flags import run_flags, run_page, tools_page  # noqa: E402
from ledger import page as ledger_table  # noqa: E402
from mkdocs.plugins import event_priority  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from upstream import page as upstream_page  # noqa: E402

from megatron import __version__  # noqa: E402

INCLUDED = {
    "tools/README.md": "guides/collecting.md",
    "examples_deepspeed/README.md": "how-to/examples.md",
    "examples_deepspeed/megatron/detxoify_lm/README.md": "guides/detoxifying.md",
    "examples_deepspeed/notebooks/text_to_chat.ipynb": "how-to/text-to-chat.md",
    "examples_deepspeed/notebooks/look_inside.ipynb": "how-to/look-inside.md",
    "tools/retro/README.md": "guides/retro-scripts.md",
    "deepspeed_configs/README.md": "guides/deepspeed-json.md",
    "benchmarks/RESULTS.md": "evidence/results.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "RELEASING.md": "design/releasing.md",
    "SECURITY.md": "reference/security.md",
    "CHANGELOG.md": "reference/changelog.md",
}
"""Files outside docs/ that are pages of the site, by their path in the repository."""

GENERATED = {
    "reference/flags.md": run_page,
    "reference/tool-flags.md": tools_page,
    "reference/megatron-flags.md": upstream_page,
}
"""Pages that are made when the site is built."""

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_OUTPUT = re.compile(r"^```text\n(.*?^```)$", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"^<!-- figure: (\w+) -->$", re.MULTILINE)
_LEDGER = re.compile(r"^<!-- ledger -->$", re.MULTILINE)
_API = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)


_FLAG_BOOST = 20
"""Factor by which a flag's own entry counts more in the search than the pages that mention it.
Shorter names count more: --save-interval comes before --non-persistent-save-interval."""


def on_config(config: Any) -> Any:
    """Shows the version below every page, and a link to the repository that the checkout is a clone
    of, where it is on the web."""
    config.copyright = f"Version {__version__}. Apache-2.0."
    config.repo_url = config.repo_url or _repository()
    return config


def _repository() -> str | None:
    git = ("git", "-C", str(ROOT), "remote", "get-url", "origin")
    try:
        address = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    address = re.sub(r"^(?:ssh://)?git@([\w.-]+)[:/]", r"https://\1/", address)
    # Without the user and the token that a clone's address may have.
    match = re.fullmatch(r"https://(?:[^/@]*@)?([\w.-]+/\S+?)(?:\.git)?", address)
    return f"https://{match[1]}" if match else None


@event_priority(-100)  # after the plugin that writes the index
def on_post_build(config: Any) -> None:
    """Adds a separate entry for each flag of a run to the index of the search."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    page = "reference/flags.html"
    index["docs"] += [
        {
            "location": f"{page}#{name.lstrip('-')}",
            "title": name,
            "text": text,
            "boost": _FLAG_BOOST / len(name.split("-")[2:]),
        }
        for name, text in run_flags()
    ]
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside docs/, and replaces the short pages that stand for generated
    ones in a checkout."""
    for source, target in INCLUDED.items():
        text = (ROOT / source).read_text()
        text = relinked(notebook(text) if source.endswith(".ipynb") else text, source)
        files.append(File.generated(config, target, content=text))
    for target, page in GENERATED.items():
        files.remove(files.src_uris[target])
        files.append(File.generated(config, target, content=page()))
    return files


def notebook(text: str) -> str:
    """Return the Markdown of a notebook: its texts, its code, and what the code has printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            printed = output.get("text") or output.get("data", {}).get("text/plain", "")
            parts.append(f"``` {{.text .wrap}}\n{''.join(printed).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draws the figures of a page, and mends its links out of docs/."""
    path = page.file.src_uri
    if path not in INCLUDED.values() and path not in GENERATED:
        markdown = relinked(markdown, f"docs/{path}")
    markdown = _API.sub(lambda match: f"::: {_dotted(match.group(1))}", markdown)
    markdown = _LEDGER.sub(lambda _: ledger_table(), markdown)
    markdown = _OUTPUT.sub(_wrapped, markdown)
    return _FIGURE.sub(lambda match: figure(match.group(1)), markdown)


def _wrapped(block: re.Match[str]) -> str:
    """A block of text; the long lines of an error message are wrapped."""
    is_error = re.search(r"^(\S+: )?(error|damaged): ", block.group(1), re.MULTILINE)
    return f"``` {{.text .wrap}}\n{block.group(1)}" if is_error else block.group(0)


def _dotted(name: str) -> str:
    """The full name of a class or function of megatron/."""
    module = file_of(name).relative_to(ROOT).with_suffix("")
    parts = [part for part in module.parts if part != "__init__"]
    return ".".join([*parts, name.rpartition(".")[2]])


def relinked(markdown: str, source: str) -> str:
    """A page whose links are those of the site.

    Args:
        markdown: text of the page, with links that work in the repository.
        source: path of the page in the repository.
    """
    page = _page_of(source)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match.group(0)
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        to = _page_of(found)
        if to is None:
            return text if "`" in text else f"`{found}`"
        assert page is not None, source
        return f"[{text}]({os.path.relpath(to, posixpath.dirname(page) or '.')}{mark}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


def _page_of(path: str) -> str | None:
    """Return the page of a repository's file in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return INCLUDED.get(path)
