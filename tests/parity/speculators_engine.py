"""Run by the Python of another environment, without draftsmith: logits of an export by the speculators package itself.

    python speculators_engine.py EXPORT TEXT.safetensors LOGITS.safetensors

TEXT holds `ids` [T], the position `at` of the last committed token that has features, and `hidden` [T, F], the features
of every token. LOGITS gets `logits` [K, V] after that token and along the text, and `sure` [K] of a confidence head.
Their classes are used as they are. Of their training forwards only what is random is fixed (which anchors), and what is
reduced to a loss is taken before that.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.dflash2 import core as dflash2_core
from speculators.models.dspark import core as dspark_core
from speculators.models.peagle import core as peagle_core
from torch import Tensor


def load(folder: str) -> Any:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config)
    if config.speculators_model_type in ("eagle3", "peagle"):
        # Embeddings that are not in the file are the target's where they are NaN, but transformers has by then put
        # whatever was in memory in their place. Their class for MTP sets them back to NaN itself.
        with torch.no_grad():
            model.embed_tokens.weight.fill_(torch.nan)
        model.load_verifier_weights()
    loaded = model.state_dict()
    for name, value in load_file(f"{folder}/model.safetensors").items():
        if not name.endswith("o_proj.bias"):
            assert torch.equal(loaded.pop(name), value), name
    left = {name for name in loaded if not name.startswith(("verifier_", "embed_tokens", "lm_head"))}
    assert not left, f"theirs alone: {sorted(left)}"
    return model.eval()


def recording(module: ModuleType) -> dict[str, Any]:
    """Record the arguments of `compute_metrics` from now on."""
    seen: dict[str, Any] = {}
    names = ("logits", "targets", "confidence_logits")

    def compute_metrics(*values: Any, **named: Any) -> tuple[Tensor, dict[str, Tensor]]:
        seen.update(zip(names, values, strict=False))
        seen.update(named)
        return torch.zeros(()), {}

    module.compute_metrics = compute_metrics
    return seen


def eagle3(model: Any, ids_T: Tensor, hidden_TF: Tensor, at: int, steps: int) -> dict[str, Tensor]:
    """Pair each token with the features of the token before it.

    With a sliding window the first step only: their later steps keep the window of the first, engines move it.
    """
    steps = 1 if model.uses_sliding_window_attn else steps
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0, at]))
    ids_1T, hidden_1TF = ids_T[None, 1:], hidden_TF[None, :-1]
    model(hidden_1TF, ids_1T, torch.zeros_like(ids_1T), ttt_steps=steps)
    return {"logits": torch.stack(logits)}


def peagle(model: Any, ids_T: Tensor, hidden_TF: Tensor, at: int, steps: int) -> dict[str, Tensor]:
    ids_1T, hidden_1TF = ids_T[None, 1:], hidden_TF[None, :-1]
    T = ids_1T.shape[1]
    chosen = torch.cat([torch.arange(T), torch.full((steps - 1,), at)])
    depth = torch.cat([torch.zeros(T).long(), torch.arange(1, steps)])
    peagle_core.generate_cod_sample_indices = lambda **_: (chosen, depth)
    seen = recording(peagle_core)
    final = torch.zeros(1, T, model.hidden_size)
    model(hidden_1TF, ids_1T, torch.zeros_like(ids_1T), verifier_last_hidden_states=final, num_depths=steps)
    return {"logits": seen["logits"][0, [at, *range(T, T + steps - 1)]]}


def dflash(model: Any, ids_T: Tensor, hidden_TF: Tensor, at: int, steps: int) -> dict[str, Tensor]:
    """The anchor is the token after `at`; position k of its block predicts token k after it, or k + 1."""
    seen = recording(dspark_core if model.config.speculators_model_type == "dspark" else dflash_core)
    mask = torch.zeros_like(ids_T)[None]
    mask[0, at + 1] = 1
    final = torch.zeros(1, len(ids_T), model.hidden_size)
    model(hidden_TF[None], ids_T[None], mask, final, torch.zeros_like(mask), max_anchors=1)
    first = 0 if model.config.sample_from_anchor else 1
    found = {"logits": seen["logits"][0, first : first + steps]}
    sure = seen.get("confidence_logits") if model.config.speculators_model_type == "dspark" else None
    return found if sure is None else {**found, "sure": sure[0, first : first + steps]}


def dflash2(model: Any, ids_T: Tensor, hidden_TF: Tensor, at: int, steps: int) -> dict[str, Tensor]:
    """The scores of their selector for the candidates of serving; training puts the target's token among them."""
    recording(dflash2_core)
    selector, given = model.candidate_selector, list[Any]()
    scored = selector.score_candidates
    selector.score_candidates = lambda *values: given.append(values) or scored(*values)
    mask = torch.zeros_like(ids_T)[None]
    mask[0, at + 1] = 1
    final = torch.zeros(1, len(ids_T), model.hidden_size)
    model(hidden_TF[None], ids_T[None], mask, final, torch.zeros_like(mask), max_anchors=1)
    unary_1bV, hidden_1bH, before_1b, _ = given[0]
    candidates_1bk, scores_1bk = selector.select(unary_1bV, hidden_1bH, before_1b)
    logits_1bV = torch.full_like(unary_1bV, -torch.inf).scatter(-1, candidates_1bk, scores_1bk)
    return {"logits": logits_1bV[0, 1 : 1 + steps]}


KINDS: dict[str, Callable[..., dict[str, Tensor]]] = {"eagle3": eagle3, "peagle": peagle, "dflash": dflash}
KINDS |= {"dflash2": dflash2, "dspark": dflash}


@torch.no_grad()
def main(folder: str, text: str, out: str) -> None:
    model, given = load(folder), load_file(text)
    run = KINDS[model.config.speculators_model_type]
    steps = model.config.speculators_config.proposal_methods[0].speculative_tokens
    found = run(model, given["ids"], given["hidden"], int(given["at"]), steps)
    if getattr(model, "d2t", None) is not None:
        whole = torch.full((len(found["logits"]), len(model.t2d)), -torch.inf)
        whole[:, torch.arange(len(model.d2t)) + model.d2t] = found["logits"]
        found["logits"] = whole
    save_file({name: value.contiguous() for name, value in found.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
