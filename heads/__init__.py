"""Drafters: one file a family, what they share in `drafter.py`, and how they are saved in `checkpoint.py`."""

from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.drafter import Drafter, TrainableDrafter
from draftsmith.heads.medusa import Medusa

HEADS: dict[str, type[TrainableDrafter]] = {
    "draft_model": DraftModel,
    "medusa": Medusa,
}
"""Those that are trained; the others have their names in `named.py`."""

__all__ = ["HEADS", "DraftModel", "Drafter", "Medusa", "TrainableDrafter"]
