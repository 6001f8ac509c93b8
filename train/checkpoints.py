"""Training state on disk: safetensors and JSON, written atomically, with hashes that show damage."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError, reason_of
from draftsmith.provenance import fingerprint
from draftsmith.reading import read_json
from draftsmith.storage import atomic_folder, write_json
from draftsmith.train.step import Last

STATE = "state.json"
HASHES = "sha256"
"""Key of `state.json`: SHA-256 of each tensor file by name, and the fingerprint of the other keys of `state.json`."""
UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError)


@dataclass(frozen=True)
class Progress:
    """The progress of a run. The order of the data, the learning rate and all randomness are functions of the step."""

    step: int
    best_tau: float
    best_step: int
    alpha: list[float] | None = None
    """Mean alpha of the last step by draft position, a weight in some objectives."""
    quality_kl: float = 0.0
    """KL of the last step, where adapters are trained on the target."""
    evaluated: bool = True
    """False when a signal came before the evaluation that is due after this step."""
    end: int | None = None
    """The run's last step, where it ends before the recipe's, see `early_end`."""
    fixed: dict[str, str] | None = None
    """See `fixed_tensors`; None in checkpoints of version 0.4 and before."""

    @property
    def last(self) -> Last:
        return Last(self.alpha, self.quality_kl)


@dataclass(frozen=True, eq=False)
class TrainState:
    """The trained weights and the optimizers' state as whole tensors, so that a run can resume under another engine."""

    weights: dict[str, Tensor]
    """Trained weights by name."""
    moments: dict[str, dict[str, Tensor]]
    """The optimizers' state by name of the weight and the optimizer's key; empty before the first step."""


def save_state(folder: Path, progress: Progress, recipe: dict[str, Any], state: TrainState, keep: int) -> None:
    """Write `folder/step-NNNNNN` atomically, then delete all but the `keep` newest.

    `recipe`: its plain values, so that a checkpoint identifies its run.
    """
    moments = {f"{name}/{key}": value for name, values in state.moments.items() for key, value in values.items()}
    with atomic_folder(checkpoint_folder(folder, progress.step)) as temporary:
        save_file(state.weights, temporary / "model.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        values = {**asdict(progress), "recipe": recipe}
        hashes = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
        write_json(temporary / STATE, {**values, HASHES: {**hashes, STATE: fingerprint(values)}})
    for old in newest_first(folder):
        if step_of(old) > progress.step:  # damaged: the run was resumed from an earlier one
            shutil.rmtree(old)
    prune(folder, progress.step, keep)


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the `keep` newest of the checkpoints up to `step`, whose own checkpoint is intact."""
    for old in [old for old in newest_first(folder) if step_of(old) <= step][keep:]:
        shutil.rmtree(old)


def trained(drafter: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name."""
    return {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}


def fixed_tensors(drafter: nn.Module) -> dict[str, str]:
    """Return a hash of each stored tensor that training does not change, by name, such as a draft vocabulary.

    Trained weights depend on them: a row of the lm_head is trained for the token that the draft vocabulary gives it.
    """
    stored = drafter.state_dict(keep_vars=True)
    return {name: _hash_of(value.detach()) for name, value in stored.items() if not value.requires_grad}


def _hash_of(tensor: Tensor) -> str:
    values = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def check_shapes(state: TrainState, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError or KeyError unless the weights and moments of `state` have these shapes."""
    for name, shape in shapes.items():
        for value in (state.weights[name], *(value for value in state.moments.get(name, {}).values() if value.ndim)):
            if tuple(value.shape) != tuple(shape):
                raise ValueError(f"{name} has shape {tuple(value.shape)}")
    if unknown := set(state.moments) - set(shapes):
        raise KeyError(min(unknown))


def load_state(folder: Path, put: Callable[[TrainState], None]) -> tuple[Progress | None, list[str]]:
    """Pass the newest readable checkpoint to `put`, which raises for one that does not fit before it changes anything.

    Returns its progress (None when there is none) and a line for each damaged checkpoint that was skipped.
    """
    problems = []
    for candidate in newest_first(folder):
        try:
            progress = _put(candidate, put)
        except UNREADABLE as error:
            problems.append(f"checkpoint {candidate.name} cannot be read ({reason_of(error)}); trying the one before")
            continue
        return progress, problems
    return None, problems


def load_from(checkpoint: Path, put: Callable[[TrainState], None]) -> Progress:
    """Pass the state of another run's checkpoint to `put` and return its progress, without that run's best drafter.

    Raises:
        DraftsmithError: for a checkpoint that cannot be read or does not fit.
    """
    try:
        progress = _put(checkpoint, put)
    except UNREADABLE as error:
        raise DraftsmithError(
            f"continue_from={checkpoint} cannot be read ({reason_of(error)}); expected an intact checkpoint"
        ) from error
    return replace(progress, best_tau=0.0, best_step=0, evaluated=False, end=None)


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step` in `folder`."""
    return folder / f"step-{step:06d}"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of the checkpoint's `state.json`; raise ValueError where it is not as it was written."""
    state = read_json(checkpoint / STATE)
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} is not an object")
    values = {key: value for key, value in state.items() if key != HASHES}
    if state[HASHES][STATE] != fingerprint(values):
        raise ValueError(f"{STATE} does not have its stored fingerprint")
    return state


def _put(checkpoint: Path, put: Callable[[TrainState], None]) -> Progress:
    state = read_state(checkpoint)
    progress = TypeAdapter(Progress).validate_python(state)
    for name, digest in state[HASHES].items():
        if name != STATE and _sha256(checkpoint / name) != digest:
            raise ValueError(f"{name} does not have its stored SHA-256")
    weights = load_file(checkpoint / "model.safetensors")
    moments: dict[str, dict[str, Tensor]] = {}
    for place, value in load_file(checkpoint / "optimizer.safetensors").items():
        name, _, key = place.rpartition("/")
        moments.setdefault(name, {})[key] = value
    put(TrainState(weights, moments))
    return progress


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, that of the last step first."""
    checkpoints = [entry for entry in folder.glob("step-*") if entry.name.removeprefix("step-").isdigit()]
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))
