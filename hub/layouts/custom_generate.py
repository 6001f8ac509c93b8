"""Any head inside stock transformers: a draftsmith checkpoint with `custom_generate/generate.py`."""

from importlib.resources import files
from pathlib import Path

from draftsmith.heads.checkpoint import save_drafter
from draftsmith.hub.layouts.layout import Serving, Source
from draftsmith.storage import write_text

CODE = "custom_generate"
"""The folder that transformers looks for."""


def write_custom_generate(source: Source) -> Serving:
    """The checkpoint as it is, and the file that transformers runs where the user trusts it."""
    drafter, before = source.drafter, next(source.drafter.parameters()).dtype
    exact = {name: value.clone() for name, value in drafter.state_dict().items()}  # which a narrower dtype rounds
    try:
        save_drafter(
            drafter.to(source.dtype),
            source.folder,
            target=source.checkpoint,
            recipe=None,
            draft_length=source.draft_length,
            tokenizer=source.tokenizer,
        )
    finally:
        drafter.to(before).load_state_dict(exact)
    write_generate(source.folder)
    usage = (
        "from transformers import AutoModelForCausalLM\n\n"
        f'target = AutoModelForCausalLM.from_pretrained("{source.target_name}")\n'
        'target.generate(**inputs, custom_generate="{folder}", trust_remote_code=True)'
    )
    notes = [
        "`custom_generate/generate.py` is run by transformers: read it, it is short. It needs the package draftsmith.",
        "It also takes `draft_length`, `policy`, `rule` and `drafter`: the folder or repository where it cannot tell.",
    ]
    return Serving("transformers", usage, "python", notes)


def write_generate(folder: Path) -> None:
    """The file that transformers runs, into a checkpoint that is already there."""
    text = files("draftsmith.hub").joinpath("generate.py.txt").read_text(encoding="utf-8")
    (folder / CODE).mkdir(exist_ok=True)
    write_text(folder / CODE / "generate.py", text)
    write_text(folder / CODE / "requirements.txt", "draftsmith>=0.1.0\n")
