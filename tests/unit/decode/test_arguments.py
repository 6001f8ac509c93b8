"""Arguments as callers of transformers have them: masks, arrays, tokenizers' outputs, None; compiled targets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama, mostly_slow
from transformers import BatchEncoding, GenerationConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith import SpeculativeDecoder, as_custom_generate, load_drafter
from draftsmith.decode.costs import Costs
from draftsmith.decode.fastest import fastest_decoder
from draftsmith.decode.passes import graphs
from draftsmith.decode.profiling import measure_costs
from draftsmith.errors import ConfigError
from draftsmith.heads import Drafter, DraftModel, Eagle3, Medusa, Mtp
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.draft_model import EarlyExit
from draftsmith.heads.model_config import eos_tokens
from draftsmith.heads.retrieval import Hybrid

IDS = torch.tensor([[0, 0, 3, 5, 6], [3, 5, 6, 7, 8]])
MASK = IDS != 0
RIGHT = torch.stack([IDS[0].roll(-2), IDS[1]])
NEW_TOKENS = 8
FORMS: dict[str, tuple[Any, Any]] = {
    "a mask of booleans": (IDS, MASK),
    "of whole numbers": (IDS, MASK.long()),
    "of floats": (IDS, MASK.float()),
    "padding on the right": (RIGHT, RIGHT != 0),
    "arrays": (IDS.numpy(), MASK.numpy()),
    "lists": (IDS.tolist(), MASK.tolist()),
    "a tokenizer's tensors": (BatchEncoding({"input_ids": IDS, "attention_mask": MASK.long()}), None),
    "its lists": ({"input_ids": IDS.tolist(), "attention_mask": MASK.long().tolist()}, None),
    "its rows": (
        BatchEncoding({"input_ids": [[3, 5, 6], [3, 5, 6, 7, 8]], "token_type_ids": [[0] * 3, [0] * 5]}),
        None,
    ),
    "a list of tensors": ([IDS[0, 2:], IDS[1]], None),
    "a list of arrays": ([IDS[0, 2:].numpy(), IDS[1].int().numpy()], None),
    "numbers of numpy": ([[*np.array([3, 5, 6])], [*np.array([3, 5, 6, 7, 8])]], None),
}


def expected(model: LlamaForCausalLM) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    text = model.generate(IDS, attention_mask=MASK.long(), eos_token_id=None, **options)
    return text[:, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_prompts_in_every_form(tiny_target: LlamaForCausalLM, form: str) -> None:
    ids, mask = FORMS[form]
    decoder = SpeculativeDecoder(tiny_target, load_drafter("prompt-lookup", tiny_target))
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    outs = decoder.generate_batch(ids, attention_mask=mask, **settings)
    assert [out.tokens for out in outs] == expected(tiny_target)
    assert [out.prompt_tokens for out in outs] == [[3, 5, 6], [3, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    "one", [IDS[1], IDS[1:], IDS[1].numpy(), [3, 5, 6, 7, 8], [[3, 5, 6, 7, 8]], BatchEncoding({"input_ids": IDS[1:]})]
)
def test_one_prompt_in_every_form(tiny_target: LlamaForCausalLM, one: Any) -> None:
    out = SpeculativeDecoder(tiny_target).generate(one, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert out.tokens == expected(tiny_target)[1]


def test_padding_of_a_single_prompt_is_left_out(tiny_target: LlamaForCausalLM) -> None:
    decoder, settings = SpeculativeDecoder(tiny_target), {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    encoded = BatchEncoding({"input_ids": IDS[:1], "attention_mask": MASK[:1]})
    for out in (decoder.generate(encoded, **settings), decoder.generate(IDS[0], attention_mask=MASK[0], **settings)):
        assert out.tokens == expected(tiny_target)[0]


def test_a_mask_of_booleans_in_generate(tiny_target: LlamaForCausalLM) -> None:
    custom = as_custom_generate(load_drafter("prompt-lookup", tiny_target))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = tiny_target.generate(IDS, attention_mask=MASK, custom_generate=custom, **options)
    assert text[:, IDS.shape[1] :].tolist() == expected(tiny_target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": BatchEncoding({"input_ids": IDS, "pixel_values": IDS})}, "'pixel_values'.*; expected it in"),
        ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, r"attention_mask lengths=\[4, 4\]; .* input_ids, \[5, 5\]"),
        ({"input_ids": IDS, "attention_mask": (MASK.float() - 1) * 1e9}, "attention_mask with other values than 0"),
        ({"input_ids": IDS / 2}, "input_ids of float32; expected whole numbers"),
        ({"input_ids": ["text"]}, "input_ids of <U4; expected whole numbers"),
        ({"input_ids": IDS[None]}, r"input_ids shape=\[1, 2, 5\]; expected \[T\] or \[B, T\]"),
        ({"input_ids": IDS, "attention_mask": MASK & (IDS[1] == 0)}, "prompt 0=0 tokens; expected at least 1"),
        ({"input_ids": [[3], []]}, "prompt 1=0 tokens; expected at least 1"),
        ({"input_ids": [[3], [4]], "seeds": [1]}, r"seeds=\[1\]; expected one for each of the 2 prompts"),
        ({"input_ids": [[3], [3, 64, 5]]}, "prompt 1 contains token 64; expected 0 to 63"),
        ({"input_ids": [[3, -1, 5]]}, "prompt 0 contains token -1; expected 0 to 63"),
        ({"input_ids": IDS[1:], "eos_token_id": "eos"}, "eos_token_id='eos'; expected a token, or several"),
        ({"input_ids": IDS[1:], "eos_token_id": 2.5}, "eos_token_id=2.5; expected a token, or several"),
    ],
)
def test_what_is_no_prompt_is_named(tiny_target: LlamaForCausalLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(tiny_target).generate_batch(**arguments)


def test_end_tokens_in_every_form(tiny_target: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(tiny_target)
    text = decoder.generate(IDS[1], max_new_tokens=NEW_TOKENS, eos_token_id=None).tokens
    end, before = text[3], text.index(text[3])
    forms = (
        end,
        [end],
        {end},
        np.int64(end),
        np.array([end, 63]),
        torch.tensor(end),
        torch.tensor([[end]]),
        [torch.tensor(end)],
    )
    for form in forms:
        out = decoder.generate(IDS[1], max_new_tokens=NEW_TOKENS, eos_token_id=form)
        assert (out.tokens, out.stopped_by) == (text[: before + 1], "eos"), form
    own = GenerationConfig()
    own.eos_token_id = torch.tensor([end, 1])  # pyright: ignore[reportAttributeAccessIssue]  # as some scripts set it
    assert eos_tokens(tiny_target.config, own) == {end, 1}


def test_none_is_the_default(tiny_target: LlamaForCausalLM) -> None:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "logits_processor", "stopping_criteria", "stop_strings")
    decoder, nothing = SpeculativeDecoder(tiny_target), dict.fromkeys((*names, "tokenizer", "attention_mask", "inputs"))
    assert decoder.generate(IDS[1], seed=None, **nothing).tokens == decoder.generate(IDS[1]).tokens
    outs = decoder.generate_batch(IDS[1:], seeds=None, decoder_input_ids=None, encoder_states=None, **nothing)
    assert outs[0].tokens == decoder.generate(IDS[1]).tokens
    assert decoder.generate_batch(IDS[1:], seeds=np.int64(3), temperature=1.0)[0].tokens == (
        decoder.generate(IDS[1], seed=3, temperature=1.0).tokens
    )


# Contexts.


def test_a_target_with_yarn_reads_all_its_positions() -> None:
    """Beyond `max_position_embeddings`, in prompts and in texts, as `generate` does."""
    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = Qwen3ForCausalLM(
        Qwen3Config(**sizes, **heads, **ids, max_position_embeddings=24, rope_parameters=yarn)
    ).double().eval()  # fmt: skip
    heads = Medusa.from_target(model)
    decoder = SpeculativeDecoder(model, load_drafter("prompt-lookup", model))
    for length in (20, 60):
        prompt = torch.randint(3, 64, (1, length))
        text = model.generate(prompt, max_new_tokens=30, do_sample=False)[0, length:].tolist()
        assert decoder.generate(prompt, max_new_tokens=30).tokens == text
        assert SpeculativeDecoder(model, heads.double()).generate(prompt, max_new_tokens=30).tokens == text
    assert len(decoder.generate([3] * 90).tokens) == 6, "24 * 4 positions"


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "hybrid"])
def test_prompts_beyond_the_drafters_context_are_decoded_without_drafts(
    tiny_target: LlamaForCausalLM, name: str
) -> None:
    """Beside prompts that the drafter reads, whose drafts stay."""
    small = DraftModel(make_llama(max_position_embeddings=16))
    eagle = Eagle3.from_target(tiny_target, layers=[1])
    eagle.context_limit = 16
    drafter = {"draft_model": small, "eagle3": eagle, "hybrid": Hybrid(small)}[name]
    prompts = [[3] + [5, 6, 7] * 8, [3, 5, 6, 7], [9] + [5, 6, 7] * 5]
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    alone = SpeculativeDecoder(tiny_target).generate_batch(prompts, **settings)
    with pytest.warns(UserWarning, match=r"prompt=25 tokens fill the \w+ drafter's context of 16: decoded without"):
        outs = SpeculativeDecoder(tiny_target, drafter, draft_length=3).generate_batch(prompts, **settings)
    assert [out.tokens for out in outs] == [out.tokens for out in alone]
    assert [any(record.drafted for record in out.rounds) for out in outs] == [False, True, False]


# Targets that their user compiled.


def as_module(model: LlamaForCausalLM) -> Any:
    return torch.compile(model, backend="eager", dynamic=True)


def as_forward(model: LlamaForCausalLM) -> Any:
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    return model


def in_place(model: LlamaForCausalLM) -> Any:
    model.compile(backend="eager", dynamic=True)
    return model


@pytest.mark.parametrize("on", mostly_slow([True, False], True))
@pytest.mark.parametrize("compile_it", mostly_slow([as_module, as_forward, in_place], in_place))
def test_a_compiled_target_is_run_as_it_is(
    compile_it: Callable[[LlamaForCausalLM], Any], on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pass that was compiled without the decoder's hooks, with several decoders."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"backend": "eager"})
    model = make_llama()
    prompts: list[list[int]] = [[3, 5, 6], [3, 5, 6, 5, 6, 5, 6, 5]]
    texts = [out.tokens for out in SpeculativeDecoder(model).generate_batch(prompts, max_new_tokens=NEW_TOKENS)]
    target = compile_it(model)
    with torch.no_grad():
        target(torch.tensor(prompts[:1]))
    medusa: Any = Medusa.from_target(model).requires_grad_(False)
    for drafter in (None, load_drafter("prompt-lookup", model), medusa):
        with pytest.warns(UserWarning, match="compiled with torch.compile, and runs uncompiled here; compile=True"):
            decoder = SpeculativeDecoder(target, drafter, compile=on)
        outs = decoder.generate_batch(prompts, max_new_tokens=NEW_TOKENS)
        assert [out.tokens for out in outs] == texts


def wrapped() -> Any:
    return torch.compile(make_llama(num_hidden_layers=3), backend="eager")


DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "early exit": EarlyExit,
    "draft model of its layers": lambda target: DraftModel.from_target(target, init="target_layers"),
    "draft model": lambda target: DraftModel(wrapped()),
    "eagle3": lambda target: Eagle3.from_target(target, layers=[1, 2, 3]).eval(),
    "mtp": lambda target: Mtp.from_target(target).eval(),
}


@pytest.mark.filterwarnings("ignore:the target was compiled")
@pytest.mark.parametrize("kind", mostly_slow(DRAFTERS, "early exit", "eagle3"))
def test_a_wrapped_target_has_drafters(kind: str) -> None:
    target: Any = wrapped()
    decoder = fastest_decoder(target, DRAFTERS[kind](target), costs=Costs({1: 1.0, 16: 1.1}, {1: 0.1}))
    assert (
        decoder.generate([5, 6, 7]).tokens
        == SpeculativeDecoder(make_llama(num_hidden_layers=3)).generate([5, 6, 7]).tokens
    )


@pytest.mark.filterwarnings("ignore:the target was compiled")
def test_a_drafter_fits_the_wrapped_target_that_it_was_trained_on(tmp_path: Path) -> None:
    for number, (first, second) in enumerate(
        [(make_llama(num_hidden_layers=3), wrapped()), (wrapped(), make_llama(num_hidden_layers=3))]
    ):
        folder = tmp_path / str(number)
        description = describe_target(first, None, "t")
        save_drafter(Medusa.from_target(first), folder, target=description, recipe=None, draft_length=3)
        assert SpeculativeDecoder(second, load_drafter(folder, second)).generate([5, 6, 7]).rounds


def on_disk(folder: Path, *names: str) -> LlamaForCausalLM:
    """Return the tiny Llama with these modules on disk."""
    make_llama().save_pretrained(folder / "model")
    modules = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    places = {name: "disk" if name in names else "cpu" for name in modules}
    return LlamaForCausalLM.from_pretrained(folder / "model", device_map=places, offload_folder=folder / "offloaded")


def test_layers_on_disk_decode_and_other_weights_there_are_refused(tmp_path: Path) -> None:
    target, expected = on_disk(tmp_path / "layer", "model.layers.1"), SpeculativeDecoder(make_llama()).generate([5, 6])
    for drafter in (DraftModel(make_llama(1)), Medusa.from_target(target).eval()):
        assert SpeculativeDecoder(target, drafter).generate([5, 6]).tokens == expected.tokens
    whole = r"weight model.layers.1.\S+ is offloaded or on disk \(device_map\); expected all weights in memory"
    for refused in (lambda: EarlyExit(target, layers=1), lambda: describe_target(target, None, "t")):
        with pytest.raises(ConfigError, match=whole):
            refused()
    for name in ("model.embed_tokens", "lm_head"):
        target = on_disk(tmp_path / name, name)
        for use in (SpeculativeDecoder, Medusa.from_target, measure_costs):
            with pytest.raises(ConfigError, match=rf"weight {name}.weight is offloaded .* expected its embeddings"):
                use(target)


def test_keyword_arguments_of_another_name_are_refused(tiny_target: LlamaForCausalLM) -> None:
    unknown: dict[str, Any] = {"max_tokens": 3}
    for call in (SpeculativeDecoder(tiny_target).generate, SpeculativeDecoder(tiny_target).generate_batch):
        with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'; expected max_new_tokens, "):
            call([3, 4], **unknown)
    with pytest.raises(TypeError, match="unexpected keyword argument 'compiled'; expected costs, compile, invariant"):
        SpeculativeDecoder(tiny_target, **{"compiled": True})
