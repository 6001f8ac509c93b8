"""wandb, tensorboard, trackio and mlflow, through accelerate: curves and decoded texts."""

import html
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.sequence import DecodeOutput
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.storage import write_text
from draftsmith.terminal import printable
from draftsmith.train.launch import TRACKER_FOLDER, RunContext
from draftsmith.train.recipe import Recipe

LEGEND = "Bold: draft tokens that the target accepted; the rest is the target's own."


@dataclass(frozen=True)
class Sample:
    """A decoded text: its prompt, and its pieces with whether the drafter proposed them."""

    prompt: str
    pieces: list[tuple[str, bool]]

    @classmethod
    def of(cls, output: DecodeOutput, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Join neighbouring tokens of the same origin into pieces, so that characters of several tokens stay whole."""
        text = IncrementalText(tokenizer, output.prompt_tokens, skip_special_tokens=False)
        pieces: list[tuple[str, bool]] = []
        for token, drafted in zip(output.tokens, output.drafted, strict=True):
            before = pieces.pop()[0] if pieces and pieces[-1][1] == drafted else ""
            pieces.append((before + printable(text.add(token)), drafted))
        pieces[-1] = (pieces[-1][0] + printable(text.rest()), pieces[-1][1])
        return cls(printable(str(tokenizer.decode(output.prompt_tokens))), pieces)

    def html(self) -> str:
        """Return the text as HTML, which Markdown may contain."""
        marked = "".join(f"<b>{html.escape(text)}</b>" if ours else html.escape(text) for text, ours in self.pieces)
        return f"{LEGEND}\n\n<pre style='white-space:pre-wrap'>{html.escape(self.prompt)}│{marked}</pre>"


PROJECT = "draftsmith"
RUN_IDS = {"wandb": "wandb-run-id", "mlflow": "mlflow-run-id"}
"""Files with the tracker's id of the run, by which a later start continues it."""


class Tracker:
    """The run's tracker, on the main process. If it fails, it is closed with a printed line, and training continues."""

    def __init__(self, context: RunContext, resumed: int | None) -> None:
        """Open the tracker's run, or resume it.

        `resumed`: the last step of the checkpoint that the run continues from; None for a new run. wandb without a key,
        and the others unless their variables name another place, write to the run's folder instead of the network.
        """
        self._accelerator, self._console = context.accelerator, context.console
        self._name = context.recipe.tracker
        self._open = context.accelerator.is_main_process
        self._try("start", lambda: self._start(context.recipe, resumed))

    def log(self, row: dict[str, Any]) -> None:
        """Log a row of `metrics.jsonl`."""
        self._try("log", lambda: self._accelerator.log(tracker_row(row), step=row["step"]))

    def show(self, step: int, outputs: list[DecodeOutput], tokenizer: PreTrainedTokenizerBase) -> None:
        """Log texts in which accepted draft tokens are marked."""
        self._try("log", lambda: self._show(step, [Sample.of(output, tokenizer) for output in outputs]))

    def close(self) -> None:
        self._try("close", self._finish)

    def _start(self, recipe: Recipe, resumed: int | None) -> None:
        folder = Path(recipe.output) / TRACKER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # Steps after the checkpoint are logged again: tensorboard drops the old ones, and wandb ignores known steps.
        options: dict[str, Any] = {"purge_step": 0 if resumed is None else resumed + 1}
        config = _flat(recipe.model_dump(mode="json"))
        later = config if resumed is None else None
        if self._name == "wandb":
            if not os.environ.get("WANDB_API_KEY"):
                os.environ.setdefault("WANDB_MODE", "offline")
            options = {"name": recipe.name, "dir": str(folder), "id": _run_id(folder), "resume": "allow"}
            # To store a config later, accelerate 1.10 would start an offline run again, in another folder.
            options, later = {**options, "config": config, "allow_val_change": True}, None
        elif self._name == "trackio":
            os.environ.setdefault("TRACKIO_DIR", str(folder.resolve()))
            options, later = {"name": recipe.name, "resume": "allow", "config": config}, None
        elif self._name == "mlflow":
            options = self._mlflow_options(recipe.name, folder.resolve())
        self._accelerator.init_trackers(PROJECT, config=later, init_kwargs={self._name: options})
        if self._name == "mlflow":
            write_text(folder / RUN_IDS["mlflow"], self._accelerator.trackers[0].tracker.info.run_id + "\n")

    def _mlflow_options(self, name: str, folder: Path) -> dict[str, Any]:
        file, options = folder / RUN_IDS["mlflow"], {"run_name": name}
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            import_module("mlflow").set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
            options["logging_dir"] = (folder / "artifacts").as_uri()
        return {**options, "run_id": file.read_text(encoding="utf-8").strip()} if file.exists() else options

    def _show(self, step: int, samples: list[Sample]) -> None:
        texts = {f"evaluation/sample_{number}": sample.html() for number, sample in enumerate(samples, 1)}
        package: Any = None if self._name == "tensorboard" else import_module(self._name)  # an optional one
        if self._name == "mlflow":
            for key, text in texts.items():
                package.log_text(text, f"{key}/step-{step:06d}.html")
            return
        kinds = {"trackio": "Markdown", "wandb": "Html"}
        shown = {key: getattr(package, kinds[self._name])(text) if package else text for key, text in texts.items()}
        self._accelerator.trackers[0].log(shown, step=step)

    def _finish(self) -> None:
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def _try(self, what: str, action: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            action()
        except Exception as error:  # any failure: a tracker must not stop a run
            self._open = False
            reason = " ".join(str(error).split())
            self._console.say(
                f"tracker={self._name} failed to {what} ({type(error).__name__}: {reason}); training continues "
                "without it, and metrics.jsonl holds everything"
            )


def _run_id(folder: Path) -> str:
    """Return wandb's id of the run, the same each time that it is started."""
    file = folder / RUN_IDS["wandb"]
    if not file.exists():
        write_text(file, secrets.token_hex(4) + "\n")
    return file.read_text(encoding="utf-8").strip()


def tracker_row(row: dict[str, Any]) -> dict[str, float]:
    """Return metrics under flat names: `train/alpha_1`, `evaluation/tau`."""
    if "evaluation" in row:
        kinds = {key: row[key] for key in ("evaluation", "average", "validation") if key in row}
        by_prompt = ("tokens", "rounds")
        return _flat({kind: {k: v for k, v in it.items() if k not in by_prompt} for kind, it in kinds.items()})
    return {f"train/{key}": value for key, value in _flat(row).items() if key != "step"}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys with slashes and number lists from 1; None becomes text, which every tracker accepts."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}/")
        elif isinstance(value, list):
            flat |= {f"{name}_{index}": item for index, item in enumerate(value, 1)}
        else:
            flat[name] = "none" if value is None else value
    return flat
