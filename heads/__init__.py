"""Drafters: one file a family, what they share in `drafter.py`, and how they are saved in `checkpoint.py`."""

from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.drafter import Drafter
from draftsmith.heads.medusa import Medusa

HEADS: dict[str, type[Drafter]] = {
    "draft_model": DraftModel,
    "medusa": Medusa,
}
