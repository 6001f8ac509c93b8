"""The model card of a drafter checkpoint: what it drafts for, what it was measured to be worth, how it was made."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import yaml

from draftsmith.errors import ConfigError
from draftsmith.storage import write_json, write_text

KINDS = {
    "draft_model": "draft model",
    "medusa": "set of Medusa heads",
    "hydra": "set of Hydra heads",
    "mlp_speculator": "MLP speculator",
    "eagle": "drafter of the EAGLE-1 kind",
    "hass": "drafter of the HASS kind",
    "eagle3": "drafter of the EAGLE-3 kind",
    "mtp": "multi-token prediction module",
    "peagle": "parallel drafter of the P-EAGLE kind",
    "dflash": "block drafter of the DFlash kind",
}


def write_card(folder: Path, evaluation: dict[str, Any], drafter: str) -> None:
    """Write `README.md` and `eval.json` into a checkpoint.

    Args:
        folder: a draftsmith checkpoint.
        evaluation: the content of an `eval.json`, of which the rows of `drafter` are kept.

    Raises:
        ConfigError: for a folder that is not a checkpoint, or a drafter without rows.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "draftsmith" not in config:
        raise ConfigError(f"{folder} was not trained by draftsmith; expected a drafter checkpoint")
    rows = [row for row in evaluation["rows"] if row["drafter"] == drafter]
    if not rows:
        raise ConfigError(f"drafter={drafter} has no rows in this evaluation; expected one that was measured")
    section = config["draftsmith"]
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True)
    text = files("draftsmith.hub").joinpath("card.md.j2").read_text(encoding="utf-8")
    card = template.from_string(text).render(
        name=drafter,
        kind=KINDS.get(section["type"], section["type"]),
        section=section,
        rows=[row for row in rows if row["category"] == "all"],
        settings=evaluation["settings"],
        environment=evaluation["environment"],
        recipe=yaml.safe_dump(section["recipe"] or {}, sort_keys=False),
    )
    write_text(folder / "README.md", card)
    # What single prompts and samples gave stays in the report: a card is read, not compared.
    write_json(folder / "eval.json", {**evaluation, "rows": rows, "measurements": [], "samples": []})
