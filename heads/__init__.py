"""Drafters: one file a family, what they share in `drafter.py`, and how they are saved in `checkpoint.py`."""

from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.eagle import Eagle, Hass
from draftsmith.heads.eagle3 import Eagle3
from draftsmith.heads.hydra import Hydra
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.mlp_speculator import MlpSpeculator
from draftsmith.heads.mtp import Mtp
from draftsmith.heads.peagle import ParallelEagle

HEADS: dict[str, type[TrainableDrafter]] = {
    "draft_model": DraftModel,
    "medusa": Medusa,
    "hydra": Hydra,
    "mlp_speculator": MlpSpeculator,
    "eagle": Eagle,
    "hass": Hass,
    "eagle3": Eagle3,
    "mtp": Mtp,
    "peagle": ParallelEagle,
    "dflash": DFlash,
}
"""Those that are trained; the others have their names in `named.py`."""

__all__ = [
    "HEADS",
    "DFlash",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Eagle3",
    "Hass",
    "Hydra",
    "Medusa",
    "MlpSpeculator",
    "Mtp",
    "ParallelEagle",
    "TrainableDrafter",
]
