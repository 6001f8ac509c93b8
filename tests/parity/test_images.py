"""Prompts with images against transformers' `generate`, in float64: chains, trees and batches of different prompts."""

import pytest
import torch
from conftest import spread
from drawn_tree import ChosenTree, widths_shape
from targets.outcome import NoisyReference
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration
from vision_models import FAMILIES, IMAGE, TEXT, ImagePrompt, build, prompt, two_images

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes import graphs
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.base import FINAL
from draftsmith.heads.draft_model import DraftModel, EarlyExit
from draftsmith.heads.hidden_states import extended

NEW_TOKENS = 16
SEED = {"gemma3": 3, "llava": 2}
"""Of weights whose texts are less repetitive than with seed 0."""


def prompts(family: str) -> list[ImagePrompt]:
    """Return prompts of different lengths with images of different sizes, two images, and no image."""
    return [
        prompt(family, 0, [7, 8, 9], [20, 21, 22]),
        prompt(family, 1, [5, 4], [23], grid=(4, 4)),
        two_images(family, 2, [11, 12, 13]),
        ImagePrompt([7, 8, 9, 20, 21], {}),
    ]


@torch.inference_mode()
def generated(model: PreTrainedModel, asked: ImagePrompt) -> list[int]:
    text = model.generate(**asked.whole(), max_new_tokens=NEW_TOKENS, do_sample=False)  # pyright: ignore
    return text[0, len(asked.ids) :].tolist()


def alone(decoder: SpeculativeDecoder, asked: list[ImagePrompt]) -> list[list[int]]:
    return [decoder.generate(one.ids, inputs=one.inputs, max_new_tokens=NEW_TOKENS).tokens for one in asked]


def together(decoder: SpeculativeDecoder, asked: list[ImagePrompt]) -> list[list[int]]:
    rows, inputs = [one.ids for one in asked], [one.inputs or None for one in asked]
    return [out.tokens for out in decoder.generate_batch(rows, inputs=inputs, max_new_tokens=NEW_TOKENS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_generate(family: str) -> None:
    model, asked = build(family, SEED.get(family, 0)), prompts(family)
    texts = [generated(model, one) for one in asked]
    assert len({tuple(text) for text in texts}) == len(texts), "the texts have to tell prompts apart"
    known = {tuple(one.ids): text for one, text in zip(asked, texts, strict=True)}
    chains, trees = (SpeculativeDecoder(model, NoisyReference(known, branches=branches)) for branches in (False, True))
    assert alone(chains, asked) == texts
    assert together(chains, asked) == texts
    if family == "qwen3_5":
        with pytest.raises(ConfigError, match="reads chains only: its recurrent layers"):
            together(trees, asked)
        return
    assert alone(trees, asked) == texts
    assert together(trees, asked) == texts


@pytest.mark.parametrize(
    ("family", "kind"), spread(["qwen3_vl", "gemma3", "llava"], ["medusa", "eagle3", "early-exit"])
)
def test_drafters_on_prompts_with_images(family: str, kind: str) -> None:
    model, asked = build(family, SEED.get(family, 0)), prompts(family)
    options = {"eagle3": {"layers": (1, 1, 2)}}
    make = EarlyExit if kind == "early-exit" else HEADS[kind].from_target
    torch.manual_seed(1)
    drafter = make(model, **options.get(kind, {})).double().eval()
    decoder = SpeculativeDecoder(model, drafter, policy=ChosenTree(widths_shape((2, 2))))
    texts = [generated(model, one) for one in asked]
    assert alone(decoder, asked) == texts
    assert together(decoder, asked) == texts


@pytest.mark.parametrize(
    ("family", "traced"),
    [
        ("qwen3_vl", False),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in FAMILIES if name != "qwen3_5"),
    ],
)
def test_compiled_passes_after_images(family: str, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as they are, or as torch traces them: over drafts, and of a drafter that reads the prompt's states."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"backend": "eager"} if traced else {"disable": True})
    model, asked = build(family, SEED.get(family, 0)), prompts(family)
    texts = [generated(model, one) for one in asked]
    known = {tuple(one.ids): text for one, text in zip(asked, texts, strict=True)}
    torch.manual_seed(1)
    eagle = HEADS["eagle3"].from_target(model, layers=(1, 1, 2)).double().eval()
    for drafter in (NoisyReference(known, branches=True), eagle):
        decoder = SpeculativeDecoder(model, drafter, compile=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert together(decoder, asked) == texts
            assert alone(decoder, asked[::3]) == texts[::3]
            assert alone(decoder, asked[::-3]) == texts[::-3], "in storage that another prompt has left"


@torch.inference_mode()
def test_features_of_layers_below_deepstack_lack_its_images() -> None:
    """Qwen3-VL adds features of images to the first layer's output, of which drafters read what was before."""
    model, asked = build("qwen3_vl", num_hidden_layers=3), prompts("qwen3_vl")[0]
    read: list[Tensor] = []
    for layer in list(model.get_submodule("model.language_model.layers").children())[1:]:
        layer.register_forward_pre_hook(
            lambda _, given, named: read.append(given[0] if given else named["hidden_states"]), with_kwargs=True
        )
    text = DecodeSequence(list(asked.ids), len(asked.ids) + NEW_TOKENS, inputs=asked.inputs)
    target = TransformersTarget(model)
    target.prefill([text], layers=(1, 2))
    features_BTF = target.features(None)
    assert features_BTF is not None
    image_T = torch.tensor(asked.ids) == IMAGE
    for layer, (feature_TH, input_1TH) in enumerate(zip(features_BTF[0].chunk(2, -1), read, strict=False), 1):
        equal_T = (feature_TH[: len(asked.ids)] == input_1TH[0]).all(-1)
        assert equal_T.tolist() == (~image_T | (layer == 2)).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
def test_states_of_the_prompt_are_those_of_the_model_with_the_images(family: str) -> None:
    """As drafters read them: of every token of the prompt, those of images included."""
    model, asked = build(family), prompts(family)
    texts = [DecodeSequence(list(one.ids), len(one.ids) + NEW_TOKENS, inputs=one.inputs) for one in asked]
    target = TransformersTarget(model)
    target.prefill(texts, layers=(1, FINAL))
    features_BTF = target.features(None)
    assert features_BTF is not None
    for row, one in enumerate(asked):
        layer_1_TH, final_TH = outputs_of_layers(model, one)
        torch.testing.assert_close(features_BTF[row, : len(one.ids)], torch.cat([layer_1_TH, final_TH], -1))
        hidden_BH = target.hidden([-1] * len(asked))
        assert hidden_BH is not None
        torch.testing.assert_close(hidden_BH[row], final_TH[-1])


def outputs_of_layers(model: PreTrainedModel, one: ImagePrompt) -> tuple[Tensor, Tensor]:
    """Return the output of the first layer of the language model, and its final states."""
    kept: list[Tensor] = []
    layer = model.get_decoder().layers[0]
    handle = layer.register_forward_hook(lambda _, __, output: kept.append(output))
    final_TH = model.base_model(**one.whole()).last_hidden_state[0]
    handle.remove()
    return kept[0][0], final_TH


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llava", "gemma3", "smolvlm"])
def test_a_draft_model_of_the_layers_of_the_language_model(family: str) -> None:
    model = build(family)
    drafter = DraftModel.from_target(model, init="target_layers", keep=[0]).double().eval()
    ids = torch.tensor([[7, 8, 9, 20]])
    expected = EarlyExit(model, layers=1).model(input_ids=ids, use_cache=False).logits
    logits = drafter.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)  # it was made in float32


def test_a_language_model_without_a_class_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be built \(.*expected other layers, drafter.config"):
        DraftModel.from_target(build("qwen3_vl"))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3", "llava"])
def test_the_teacher_reads_rows_with_their_images(family: str) -> None:
    """A row with an image, a shorter one with another, and one of text alone, padded to one width."""
    model, answer = build(family), [9, 10, 11, 12, 13]
    asked = [prompt(family, 0, [7, 8, 9], [20]), prompt(family, 1, [5], [6], grid=(4, 4)), ImagePrompt([7, 8, 20], {})]
    texts = [one.ids + answer for one in asked]
    inputs = [extended(one.inputs, len(one.ids), len(text)) for one, text in zip(asked, texts, strict=True)]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    teacher = OnlineTeacher(model, layers=(1, FINAL))
    signals = teacher.signals(Batch(ids, mask, mask.bool(), inputs=[given or None for given in inputs]))
    assert signals.features_BTF is not None
    for row, (one, text) in enumerate(zip(asked, texts, strict=True)):
        whole = ImagePrompt(text, inputs[row])
        layer_1_TH, final_TH = outputs_of_layers(model, whole)
        torch.testing.assert_close(signals.hidden_BTH[row, : len(text)], final_TH)
        torch.testing.assert_close(signals.features_BTF[row, : len(text)], torch.cat([layer_1_TH, final_TH], -1))
        out = SpeculativeDecoder(model).generate(one.ids, inputs=one.inputs, max_new_tokens=1)
        place = len(one.ids) - 1
        assert out.tokens == [int(teacher.lm_head(signals.hidden_BTH[row, place]).argmax())], "as in decoding"


def sounds(seed: int, before: list[int], after: list[int]) -> ImagePrompt:
    """Return text, a random sound of 32 frames, which takes 8 tokens, and text."""
    frames = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.ones(1, 32, dtype=torch.long)
    return ImagePrompt([*before, *[IMAGE] * 8, *after], {"input_features": frames, "feature_attention_mask": mask})


@pytest.mark.parametrize("branches", [False, True])
def test_prompts_with_sounds(branches: bool) -> None:
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16}
    audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "max_source_positions": 16, "init_std": 0.25}
    config = Qwen2AudioConfig(
        audio_config={**audio, **sizes}, text_config={"model_type": "qwen2", **TEXT}, audio_token_id=IMAGE
    )
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(config).double().eval()
    model.generation_config = GenerationConfig(bos_token_id=2, pad_token_id=0)
    asked = [sounds(0, [7, 8, 9], [20]), sounds(1, [5], [22, 23]), ImagePrompt([7, 8, 9, 20], {})]
    texts = [generated(model, one) for one in asked]
    assert len({tuple(text) for text in texts}) == len(texts)
    known = {tuple(one.ids): text for one, text in zip(asked, texts, strict=True)}
    decoder = SpeculativeDecoder(model, NoisyReference(known, branches=branches))
    assert alone(decoder, asked) == texts
    assert together(decoder, asked) == texts
