"""mkdocs hook: the page `guide/tutorial.md`, rendered from the notebook with its outputs."""

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the page; the notebook itself is a file of the site."""
    notebook = json.loads((Path(config.docs_dir) / "guide" / "tutorial.ipynb").read_text(encoding="utf-8"))
    files.append(File.generated(config, "guide/tutorial.md", content=as_markdown(notebook)))
    return files


def as_markdown(notebook: dict[str, Any]) -> str:
    """Return the cells as Markdown: code, and printed text as a block after it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        printed = "".join("".join(output["text"]) for output in cell.get("outputs", ()))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
