"""Train state on disk: safetensors and JSON, whole or not there at all."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.storage import atomic_folder, write_json


@dataclass(frozen=True)
class Progress:
    """How far a run has come. The data's order, the rate and all randomness are functions of the step."""

    step: int
    best_tau: float
    best_step: int
    alpha: list[float] | None = None
    """Of the last step, by draft position: some objectives weigh with it."""


def save_state(
    folder: Path, progress: Progress, drafter: nn.Module, optimizers: list[torch.optim.Optimizer], keep: int
) -> None:
    """Write `folder/step-NNNNNN` atomically, then delete all but the `keep` newest."""
    moments = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in trained(drafter).items()
        for optimizer in optimizers
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }
    weights = {name: value.detach().cpu().contiguous() for name, value in trained(drafter).items()}
    with atomic_folder(folder / f"step-{progress.step:06d}") as temporary:
        save_file(weights, temporary / "model.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", asdict(progress))
    for old in _newest_first(folder)[keep:]:
        shutil.rmtree(old)


def trained(drafter: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes, by name."""
    return {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}


def load_state(
    folder: Path, drafter: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[Progress | None, list[str]]:
    """Restore the newest checkpoint that can be read.

    Returns its progress (None when there is none) and a line for each damaged one that was passed over.
    """
    problems = []
    for candidate in _newest_first(folder):
        try:
            weights = load_file(candidate / "model.safetensors")
            moments = load_file(candidate / "optimizer.safetensors")
            progress = Progress(**json.loads((candidate / "state.json").read_text(encoding="utf-8")))
            _restore(weights, moments, drafter, optimizers)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            problems.append(f"checkpoint {candidate.name} cannot be read ({error}); trying the one before")
            continue
        return progress, problems
    return None, problems


def _restore(weights: dict, moments: dict, drafter: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    parameters = trained(drafter)
    state: dict[Any, dict[str, torch.Tensor]] = {}
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}")
    for name, value in moments.items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameters[parameter], {})[key] = value
    # Only now that everything is known to be there, so that a torn file changes nothing.
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter in state:
                optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in state[parameter].items()
                }


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)
