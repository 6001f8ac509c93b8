"""Write `docs/reference/targets.md`: `python -m tests.targets`."""

import warnings

import torch
from transformers import logging

from .outcome import outcome_of
from .page import PAGE, page
from .tiny import model_classes
from .vision import vision_classes

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # the models are tiny
    outcomes = []
    for kind in (model_classes() | vision_classes()).values():
        outcomes.append(outcome_of(kind))
        print(outcomes[-1].name, outcomes[-1].broken or outcomes[-1].chains, flush=True)
    PAGE.write_text(page(outcomes), encoding="utf-8")
