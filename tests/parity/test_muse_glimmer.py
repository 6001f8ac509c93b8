"""transformers' `muse_glimmer_assistant`: logits of its class, drafts for a target of its family, its files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.published_files import (
    DRAFTED,
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PROMPT,
    THETA,
    VOCAB,
    embedded,
    hidden_states,
    six_layers,
)
from recording import decoded_logits

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.decode.target import TransformersTarget
from draftsmith.hub.export import export_drafter

assistants = pytest.importorskip("transformers.models.muse_glimmer_assistant")
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS}
SIZES |= {"num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 128}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def assistant(folder: Path, **changes: Any) -> Any:
    """Return a model of transformers with random weights, which is saved in `folder`."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    given = {"block_size": 4, "mask_token_id": 17, "target_layer_ids": [1, 3], "rope_parameters": rope, **changes}
    config = assistants.MuseGlimmerAssistantConfig(num_hidden_layers=2, **SIZES, **SPECIAL, **given)
    torch.manual_seed(0)
    model = assistants.MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_((1 if parameter.dim() == 1 else 0) + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.double()


@pytest.mark.parametrize("size", [4, 7], ids=["block shorter than the window", "longer"])
@pytest.mark.parametrize("kinds", [["sliding_attention", "full_attention"], ["full_attention"] * 2, None], ids=str)
def test_logits_are_those_of_the_class(kinds: list[str] | None, size: int, tmp_path: Path) -> None:
    """The prompt read at once and in rounds, in which its cache keeps the last features only. 1e-5: float32 angles."""
    from transformers.cache_utils import DFlashCache

    model = assistant(tmp_path, layer_types=kinds, sliding_window=4, block_size=size)
    target, n = six_layers().double(), len(PROMPT)
    context, block = hidden_states(target, [2, 4])[None], embedded(target, [DRAFTED[0]] + [17] * (size - 1))[None]
    ours = decoded_logits(load_drafter(tmp_path, target), target, PROMPT, [*DRAFTED, 9, 2, 7][:size])
    for ends in ([n], [3, 5, n]):
        cache, start, out = DFlashCache(config=model.config), 0, None
        cache.activate_past_recording()
        for end in ends:
            if start:
                cache.crop(-size)
            cache.set_previous_accepted_tokens(end - start)
            positions = torch.arange(start, end + size)[None]
            out = model(block, context[:, start:end], position_ids=positions, cache=cache).last_hidden_state
            start = end
        assert out is not None
        assert (ours - target.lm_head(out[0, 1:])).abs().max() < 1e-5


def test_drafts_beside_a_target_of_the_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embeddings are normed, and its logits scaled and capped; the assistant's are neither. Files come back."""
    from transformers.models.muse_glimmer import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    text = {**SIZES, **SPECIAL, "vocab_size": VOCAB, "num_hidden_layers": 6, "output_multiplier": 0.5}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(1)
    target = MuseGlimmerForConditionalGeneration(MuseGlimmerConfig(text_config=text, vision_config=vision))
    target = target.eval().requires_grad_(False).double()
    for parameter in target.parameters():
        parameter.copy_((1 if parameter.dim() == 1 else 0) + 0.3 * torch.randn_like(parameter))
    target.generation_config.eos_token_id = None
    model, drafts, theirs = assistant(tmp_path / "d", sliding_window=6), list[list[int]](), list[list[int]]()
    forward, verify = model.forward, TransformersTarget.verify

    def recorded(*given: Any, **named: Any) -> Any:
        out = forward(*given, **named)
        theirs.append(target.lm_head(out.last_hidden_state[0, 1:]).argmax(-1).tolist())
        return out

    def noted(reader: TransformersTarget, tokens_BQ: torch.Tensor, shapes: Any) -> Any:
        drafts.append(tokens_BQ[0, 1:].tolist())
        return verify(reader, tokens_BQ, shapes)

    monkeypatch.setattr(model, "forward", recorded)
    monkeypatch.setattr(TransformersTarget, "verify", noted)
    ids = torch.tensor([PROMPT])
    given = {"assistant_model": model, "speculation_type": "dflash", "attention_mask": torch.ones_like(ids)}
    text = target.generate(ids, max_new_tokens=20, do_sample=False, **given)[0, len(PROMPT) :].tolist()
    drafter = load_drafter(tmp_path / "d", target)
    decoder = SpeculativeDecoder(target, drafter, draft_length=3)
    assert decoder.generate(PROMPT, max_new_tokens=20, temperature=0, eos_token_id=None).tokens == text
    assert drafts[:12] == theirs[:12]
    out = export_drafter(drafter, target, "transformers", tmp_path / "again", target_name="org/target").folder
    again = assistants.MuseGlimmerAssistantModel.from_pretrained(out).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    read = load_drafter(out, target)
    assert read.options() == drafter.options()
