"""Greedy divergences, near ties and bugs on targets that were made to have them."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from vision_models import build
from vision_models import prompt as image_prompt

from draftsmith import SpeculativeDecoder
from draftsmith.eval.lossless.check import ArmCheck, Check, greedy_verdict, sentences
from draftsmith.eval.lossless.greedy import GreedyCheck, check_greedy, divergences, read
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.session import load_session
from draftsmith.eval.settings import CheckSettings, PairSettings
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.hidden_states import extended

PROMPT = Prompt("p", "x", [5, 9, 33, 2])
LENGTH = 16


def greedy(target: LlamaForCausalLM, prompt: list[int] = PROMPT.input_ids, length: int = LENGTH) -> list[int]:
    settings = {"max_new_tokens": length}
    return SpeculativeDecoder(target).generate(prompt, **settings).tokens


def with_rival(gap: float, dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, list[int], list[int], int]:
    """A target that has two tokens for one: the second of its lm_head's rows is the first one, less `gap` of it.

    Also its greedy text, the text that takes the rival once and continues greedily from there, and where it does.
    """
    target = make_llama()
    own = greedy(target)
    place = next(i for i in range(3, LENGTH) if own[i] not in own[:i])
    rival = next(token for token in range(own[place] + 1, 64) if token not in own)  # of equals the first is taken
    with torch.no_grad():
        target.lm_head.weight[rival] = target.lm_head.weight[own[place]] * (1 - gap)
    target = target.to(dtype)
    own = greedy(target)
    taken = [*own[:place], rival]
    return target, own, [*taken, *greedy(target, PROMPT.input_ids + taken, LENGTH - place - 1)], place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_are_a_near_tie(dtype: torch.dtype) -> None:
    target, own, other, place = with_rival(0.0, dtype)
    found = divergences(target, PROMPT, other, own)
    assert found[0].position == place
    assert {divergence.kind for divergence in found} == {"near tie"}
    assert found[0].gap == found[0].margin == 0.0
    assert found[0].expected == own[place]
    assert found[0].token == other[place] != own[place]


def test_what_is_a_bug_in_fp32_can_be_rounding_in_bf16() -> None:
    """A gap of 0.3 % of the logit: five orders above fp32's rounding, and one unit in bf16's last place."""
    target, own, other, _ = with_rival(0.003)
    assert {divergence.kind for divergence in divergences(target, PROMPT, other, own)} == {"bug"}
    target, own, other, _ = with_rival(0.003, torch.bfloat16)
    assert {divergence.kind for divergence in divergences(target, PROMPT, other, own)} <= {"near tie"}


def test_in_16_bits_gap_and_bound_come_from_a_pass_in_float32() -> None:
    """The target itself, and where its weights are stored, stay as they are."""
    target, own, other, place = with_rival(0.003, torch.bfloat16)
    places = [weight.data_ptr() for weight in target.state_dict().values()]
    found = divergences(target, PROMPT, other, own)[0]
    assert [weight.data_ptr() for weight in target.state_dict().values()] == places
    text = torch.tensor([other])
    readings = [read(target, PROMPT, text, width=width)[0].float() for width in (None, 1, 5)]
    exact_TV = read(deepcopy(target).float(), PROMPT, text)[0]
    assert found.gap == pytest.approx(float(exact_TV[place].max() - exact_TV[place, other[place]]), abs=1e-5)
    best_K = exact_TV[place].topk(10).indices
    error = max(float((reading[place] - exact_TV[place])[best_K].abs().max()) for reading in readings)
    assert found.bound == pytest.approx(4 * max(error, 2**-7 * float(exact_TV[place].max())), abs=1e-5)


def test_without_a_pass_in_twice_the_precision_nothing_is_judged() -> None:
    """A target that runs in 16 bits only: the verdict is inconclusive and names the error; another end stays a bug."""
    target, own, other, place = with_rival(0.003, torch.bfloat16)

    def refuse(module: torch.nn.Module, _: object) -> None:
        if module.get_parameter("weight").dtype != torch.bfloat16:
            raise RuntimeError("a kernel of\n16 bits only")

    target.lm_head.register_forward_pre_hook(refuse)
    found = divergences(target, PROMPT, other, own)
    first = found[0]
    assert (first.position, first.margin, first.gap, first.bound) == (place, None, None, None)
    assert {divergence.kind for divergence in found} == {"difference not judged"}
    assert first.failure == "RuntimeError: a kernel of 16 bits only"
    assert {weight.dtype for weight in target.parameters()} == {torch.bfloat16}
    checked = GreedyCheck(1, 0, LENGTH, 3, found)
    assert greedy_verdict(checked) == "inconclusive"
    arm = ArmCheck("d", "chain", "greedy", 0.0, "inconclusive", greedy=checked)
    environment = {"versions": {}}
    line, detail = sentences(Check(CheckSettings(target="t", drafters={"d": "d"}), environment, {}, [arm]))
    assert f"0 near ties, 0 tokens that no rounding explains; {len(found)} not judged." in line
    assert detail.startswith(f"  First difference not judged: prompt p, new token {place}: ")
    assert "16 bits only" in detail
    *_, last = divergences(target, PROMPT, [*other, 1], other)
    assert (last.position, last.kind) == (LENGTH, "bug")
    assert greedy_verdict(GreedyCheck(1, 0, LENGTH, 3, [*found, last])) == "lossy"


def test_margins_of_a_loaded_target_are_those_of_float64(tmp_path: Path, tiny_target_folder: Path) -> None:
    """Layers large enough for any preparation of their weights that loading does."""
    vocab = AutoConfig.from_pretrained(tiny_target_folder).vocab_size
    make_llama(vocab_size=vocab, hidden_size=512, intermediate_size=512, initializer_range=0.05).save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(tiny_target_folder).save_pretrained(tmp_path)
    drafters = {"suffix": "suffix"}
    target = load_session(PairSettings(target=str(tmp_path), drafters=drafters), None, progress=False).target
    exact_V = read(deepcopy(target).double(), PROMPT, torch.tensor([[0]]))[0, 0]
    (first, second), ids = exact_V.topk(2)
    best, other = ids.tolist()
    found = divergences(target, PROMPT, [other], [best])[0]
    assert found.margin == found.gap == pytest.approx(float(first - second), abs=1e-12)


def test_another_token_is_a_bug_even_after_a_near_tie() -> None:
    target, own, other, place = with_rival(0.0)
    wrong = (other[place + 3] + 1) % 64
    found = divergences(target, PROMPT, [*other[: place + 3], wrong, *other[place + 4 :]], own)
    assert found[0].kind == "near tie"
    assert (place + 3, "bug") in {(divergence.position, divergence.kind) for divergence in found}


def test_a_text_that_ends_elsewhere_is_a_bug() -> None:
    target = make_llama()
    own = greedy(target)
    for tokens, alone in ((own[:9], own), (own, own[:9])):
        (found,) = divergences(target, PROMPT, tokens, alone)
        assert (found.position, found.kind, found.gap) == (9, "bug", None)


def test_a_whole_check() -> None:
    target = make_llama()
    decoder = SpeculativeDecoder(target, DraftModel(make_llama(1)), draft_length=3)
    prompts = [PROMPT, Prompt("q", "x", [7])]
    alone = [greedy(target, prompt.input_ids, 20) for prompt in prompts]
    done: list[int] = []
    checked = check_greedy(target, decoder, prompts, alone, max_new_tokens=20, done=done.append)
    assert (checked.prompts, checked.identical, checked.divergences) == (2, 2, [])
    assert checked.drafted > 0
    assert sum(done) == checked.tokens
    alone[1] = [*alone[1][:5], alone[1][5] ^ 1, *alone[1][6:]]
    checked = check_greedy(target, decoder, prompts, alone, max_new_tokens=20, done=done.append)
    assert checked.identical == 1
    assert checked.divergences[0].position == 5


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llava"])
def test_readings_of_a_text_after_an_image(family: str) -> None:
    """In parts and in one pass, as without a cache; a text after it does not read the position of the image."""
    model = build(family)
    asked, text = image_prompt(family, 0, [7, 8], [20]), torch.tensor([[9, 10, 11, 12, 13, 14]])
    prompt, plain = Prompt("p", "c", asked.ids, inputs=asked.inputs), Prompt("t", "c", [7, 8, 20])
    whole = extended(asked.inputs, len(asked.ids), len(asked.ids) + 5)
    ids = torch.tensor([asked.ids + text[0, :-1].tolist()])
    expected = model(input_ids=ids, **whole, use_cache=False).logits[:, -6:]
    ids = torch.tensor([plain.input_ids + text[0, :-1].tolist()])
    expected_plain = model(input_ids=ids, position_ids=torch.arange(8)[None], use_cache=False).logits[:, -6:]
    for width in (None, 1, 4):
        torch.testing.assert_close(read(model, prompt, text, width=width), expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(read(model, plain, text, width=width), expected_plain, rtol=0, atol=1e-9)
