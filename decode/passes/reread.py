"""Passes of a model whose cache cannot discard draft tokens: it reads committed tokens again, with the next draft.

    own cache of the model | committed since, read again | draft ......... |

Each pass continues a copy of the model's own cache, which is moved on after `MOST_AGAIN` tokens. A model without a
cache, or one that continues its cache by one token at a time only, reads the whole text in each pass instead.
"""

from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache.recurrent import MOST_AGAIN
from draftsmith.decode.cache.rollback import cache_name
from draftsmith.decode.passes.attention import Passes

# Shapes: Q new tokens, S tokens of the text so far.


class Reread:
    """One text and, with passes "copied", the model's own cache of its first tokens."""

    def __init__(self, model: PreTrainedModel, passes: Passes, rows: int) -> None:
        assert rows == 1, "`Capability` has such texts decoded one after another"
        self._model, self._copies = model, passes == "copied"
        self._takes_keep = "logits_to_keep" in signature(model.forward).parameters
        self._cache: Any = None
        self._cached = 0
        self._ids_1S = torch.empty(1, 0, dtype=torch.long, device=next(model.parameters()).device)

    def read(self, inputs: dict[str, Any], start: int, length: int, *, committed: bool) -> Any:
        """Return the model's output for new tokens after the first `start` ones; its last columns are theirs.

        Args:
            inputs: arguments of the model, of which the tokens [1, Q], positions and cache are replaced.
            length: number of committed tokens so far.
            committed: the new tokens will not be discarded.
        """
        if self._takes_keep:
            inputs["logits_to_keep"] = inputs["input_ids"].shape[1]
        self._ids_1S = torch.cat([self._ids_1S[:, :start], inputs["input_ids"]], 1)
        if self._copies and length - self._cached >= MOST_AGAIN:
            self._continue(inputs, length, moves=True)
        return self._continue(inputs, self._ids_1S.shape[1], moves=committed)

    def _continue(self, inputs: dict[str, Any], end: int, *, moves: bool) -> Any:
        """Read the tokens between the cache and `end`; with `moves` they are in the cache from now on."""
        name = cache_name(inputs)
        own = {key: value for key, value in inputs.items() if key != name}
        own |= {"input_ids": self._ids_1S[:, self._cached : end], "use_cache": self._copies}
        if self._copies:
            own[name] = self._cache if moves else deepcopy(self._cache)
        if "position_ids" in inputs:
            own["position_ids"] = torch.arange(self._cached, end, device=self._ids_1S.device)[None]
        output = self._model(**own)
        if moves and self._copies:
            self._cache, self._cached = output[name], end
        return output
