"""The best drafter so far, by measured tau: what a run is for, kept whole on disk."""

from pathlib import Path
from typing import Any

from draftsmith.distill.cotraining import Adapters, adapted_fingerprint
from draftsmith.distill.targets import LoadedTarget
from draftsmith.heads import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.provenance import model_fingerprints
from draftsmith.storage import atomic_folder
from draftsmith.train.output import DRAFTER, TARGET
from draftsmith.train.recipe import Recipe


class BestDrafter:
    """Writes the drafter, and the adapters of the target it belongs to where there are some, into the run's folder."""

    def __init__(self, recipe: Recipe, target: LoadedTarget, drafter: TrainableDrafter, draft_length: int) -> None:
        """To be made before there are adapters on the target: its fingerprint is the original's."""
        self.tau, self.step = 0.0, 0
        self.adapters: Adapters | None = None
        self._recipe, self._target, self._drafter, self._draft_length = recipe, target, drafter, draft_length
        self._described = describe_target(target.model, target.tokenizer, target.name, target.revision)
        self._base_fingerprints = model_fingerprints(target.model)

    def offer(self, step: int, result: dict[str, Any]) -> None:
        """Keep the drafter as it is when its tau is the best so far, and its target has not moved too far."""
        quality = result.get("target_quality")
        fits = quality is None or quality["kl"] <= self._recipe.cotrain.max_quality_kl
        if result["tau"] > self.tau and fits:
            self.save(quality)
            self.tau, self.step = result["tau"], step

    def save(self, quality: dict[str, Any] | None) -> None:
        """Write the drafter as it is; `quality`: what was measured of a target that is trained too."""
        folder, target = Path(self._recipe.output), self._target
        if self.adapters is not None:
            tensors = self.adapters.tensors()
            own, in_float16 = (adapted_fingerprint(base, tensors) for base in self._base_fingerprints)
            name = f"{target.name} with the adapter {self._recipe.name}"
            self._described |= {"name": name, "model_fingerprint": own, "quality": quality}
            self._described["float16_fingerprint"] = in_float16
            with atomic_folder(folder / TARGET) as temporary:
                self.adapters.save(temporary, target.name, quality)
                target.tokenizer.save_pretrained(temporary)
        with atomic_folder(folder / DRAFTER) as temporary:
            save_drafter(
                self._drafter,
                temporary,
                target=self._described,
                recipe=self._recipe.model_dump(mode="json", exclude={"publish"}),
                draft_length=self._draft_length,
                tokenizer=target.tokenizer,
            )
