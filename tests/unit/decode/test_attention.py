"""Attention of verification passes: no mask for chains, no expanded heads, flash attention, and untouched models."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import make_llama
from drawn_tree import ChosenTree, widths_shape
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith import SpeculativeDecoder
from draftsmith.decode import target
from draftsmith.decode.passes import attention
from draftsmith.decode.passes.attention import GROUPED, attend, passes_of
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies import Chain
from draftsmith.heads.draft_model import DraftModel, EarlyExit
from draftsmith.heads.draft_tree import Draft

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
PROMPTS = [[7, 8, 9, 10, 11, 12], [5, 4, 3]]
CHAIN, TREE = Draft((3, 4, 5), (-1, 0, 1)), Draft((3, 4, 5), (-1, -1, 0))
FAKE = "fake_flash"


class Recorder(TorchDispatchMode):
    """Keeps the shapes that reach attention kernels, and those of all 4-dimensional results and all bool results."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[tuple[int, ...]] = []
        self.keys: list[tuple[int, ...]] = []
        self.made: set[tuple[int, ...]] = set()
        self.masks: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.queries.append(tuple(args[0].shape))
            self.keys.append(tuple(args[1].shape))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made.add(tuple(out.shape))
            if out.dtype == torch.bool:
                self.masks.add(tuple(out.shape))
        return out


@torch.inference_mode()
def read(
    model: PreTrainedModel, drafts: Sequence[Draft], prompts: Sequence[list[int]], mode: Recorder | None = None
) -> list[Tensor]:
    """The logits [N, V] of the nodes of drafts after prompts; the second pass is recorded."""
    runner = ModelRunner(model, len(prompts))
    runner.append([list(prompt[:-1]) for prompt in prompts])
    rows = [torch.tensor([prompt[-1], *draft.tokens]) for prompt, draft in zip(prompts, drafts, strict=True)]
    tokens_BQ = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with mode or torch.no_grad():
        logits_BQV = runner.tree(tokens_BQ, [draft.parents for draft in drafts])
    return [logits_QV[1 : len(draft) + 1] for logits_QV, draft in zip(logits_BQV, drafts, strict=True)]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_chain_builds_no_mask_over_the_context_for_its_rows(rows: int) -> None:
    recorder, model, masks = Recorder(), make_llama(**HEADS), []
    model.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    read(model, [CHAIN] * rows, PROMPTS[:1] * rows, recorder)
    assert masks[0] is None
    assert masks[1].numel() == 0
    slots = len(PROMPTS[0]) + len(CHAIN)
    assert not [shape for shape in recorder.masks if shape[-1:] == (slots,)]
    assert recorder.keys == [(rows, 2, slots, 4)] * 2
    assert not [shape for shape in recorder.made if shape[-2:] == (slots, 4) and shape[:2] != (rows, 2)]


def test_a_pass_of_one_token_groups_its_query_heads() -> None:
    model = make_llama(**HEADS).double()
    runner, recorder = ModelRunner(model, 1), Recorder()
    with torch.inference_mode():
        runner.append([PROMPTS[0]])
        with recorder:
            logits_1V = runner.append([[3]])
        expected_V = model(torch.tensor([[*PROMPTS[0], 3]])).logits[0, -1]
    assert recorder.queries == [(1, 2, 4, 4)] * 2
    torch.testing.assert_close(logits_1V[0], expected_V, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("drafts", "prompts"), [([TREE], PROMPTS[:1]), ([CHAIN, CHAIN], PROMPTS)], ids=["tree", "ragged"]
)
def test_a_mask_does_not_expand_key_heads(drafts: list[Draft], prompts: list[list[int]]) -> None:
    recorder, rows, slots = Recorder(), len(prompts), len(PROMPTS[0]) + 3
    read(make_llama(**HEADS), drafts, prompts, recorder)
    assert recorder.keys == [(rows, 2, slots, 4)] * 2
    assert not [shape for shape in recorder.made if shape[-2:] == (slots, 4) and 8 in shape]


def test_a_sliding_layer_reads_the_slots_of_its_window_only() -> None:
    """Its mask covers them alone; the window of this model is 6."""
    recorder = Recorder()
    read(mistral("sdpa"), [CHAIN], [list(range(3, 33))], recorder)
    slots = 6 + len(CHAIN)  # the window of the root, and the chain after it
    assert recorder.keys == [(1, 2, slots, 8)] * 2
    assert max(shape[-1] for shape in recorder.masks) == slots


def test_long_chains_are_read_with_transformers_function() -> None:
    """Beyond `MOST_GROUPED` queries; the logits are those of a plain forward pass."""
    model = make_llama(**HEADS, max_position_embeddings=256).double()
    tokens = [token % 60 for token in range(3, 3 + attention.MOST_GROUPED + 2)]
    runner = ModelRunner(model, 1)
    with torch.inference_mode():
        runner.append([PROMPTS[0]])
        logits_1V = runner.append([tokens])
        expected_V = model(torch.tensor([[*PROMPTS[0], *tokens]])).logits[0, -1]
    torch.testing.assert_close(logits_1V[0], expected_V, atol=1e-9, rtol=0)


def names_of(model: nn.Module) -> list[str]:
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return [config._attn_implementation for config in configs if hasattr(config, "_attn_implementation")]


def test_configs_are_as_before_after_a_text_and_after_an_error() -> None:
    model = make_llama(**HEADS)
    exits = EarlyExit(model, layers=1)
    before, names = model.config.to_dict(), [names_of(model), names_of(exits.model)]
    decoder = SpeculativeDecoder(model, exits, policy=Chain(3))
    during: list[str] = []
    layer = model.model.layers[0]
    handle = layer.register_forward_hook(lambda *_: during.extend(names_of(model) + names_of(exits.model.model.layers)))
    decoder.generate(PROMPTS[0], max_new_tokens=8)
    assert set(during) == {GROUPED}, "of the layers of both models, while they run"
    handle.remove()

    def fail(*_: object) -> None:
        raise RuntimeError("a device failed")

    handle = layer.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a device failed"):
        decoder.generate(PROMPTS[0], max_new_tokens=8)
    assert [names_of(model), names_of(exits.model)] == names
    assert {name for group in names for name in group} == {"sdpa"}
    assert model.config.to_dict() == before


def test_a_model_that_only_transformers_function_computes_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = make_llama(**HEADS), DraftModel(make_llama(1))
    expected = SpeculativeDecoder(make_llama(**HEADS), drafter).generate(PROMPTS[0], max_new_tokens=12).tokens

    def wrong(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return attend(*args, **kwargs)[0] * 1.1, None

    monkeypatch.setitem(AttentionInterface._global_mapping, GROUPED, wrong)
    assert SpeculativeDecoder(model, drafter).generate(PROMPTS[0], max_new_tokens=12).tokens == expected
    assert passes_of(model) == "masked"


# Flash attention: a function with its interface stands in for the package, which needs a GPU.


class Flash:
    """Causal attention aligned with the last key, within the layer's window; it takes no mask."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        assert attention_mask is None, "flash attention takes no mask of tokens by slots"
        Q, S = query.shape[2], key.shape[2]
        self.widths.append(Q)
        mask = torch.ones(Q, S, dtype=torch.bool).tril(S - Q)
        if (window := kwargs.get("sliding_window")) is not None:
            mask = mask.triu(S - Q - window + 1)
        return sdpa_attention_forward(module, query, key, value, mask[None, None], scaling=kwargs["scaling"])


@pytest.fixture
def flash() -> Iterator[Flash]:
    function = Flash()
    AttentionInterface.register(FAKE, function)
    yield function
    del AttentionInterface._global_mapping[FAKE]


def mistral(name: str) -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=6, initializer_range=0.3
    )
    model = MistralForCausalLM(config).eval()
    model.config._attn_implementation = name
    return model


@pytest.mark.parametrize("build", ["llama", "mistral"])
def test_flash_attention_reads_chains_and_other_passes_use_sdpa(build: str, flash: Flash) -> None:
    """Every text is the one that sdpa gives, beyond the window of sliding layers too."""
    plain, fast = (mistral(name) if build == "mistral" else make_llama(**HEADS) for name in ("sdpa", FAKE))
    fast.config._attn_implementation = FAKE
    drafter, settings = DraftModel(plain), {"max_new_tokens": 20, "eos_token_id": None}
    expected = [SpeculativeDecoder(plain).generate(prompt, **settings).tokens for prompt in PROMPTS]
    for policy, reads in ((Chain(3), True), (ChosenTree(widths_shape((2, 1))), False)):
        decoder = SpeculativeDecoder(fast, drafter, policy=policy)
        flash.widths.clear()
        assert [decoder.generate(prompt, **settings).tokens for prompt in PROMPTS] == expected
        assert (4 in flash.widths) == reads, "a chain of three and its root, and no tree"
        assert [out.tokens for out in decoder.generate_batch(PROMPTS, **settings)] == expected
    assert set(names_of(fast)) == {FAKE}


def test_flash_attention_that_reads_chains_wrongly_is_refused(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama(**HEADS)
    model.config._attn_implementation = FAKE

    def top_left(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any) -> Any:
        wide = query.shape[2]
        return sdpa_attention_forward(
            module, query, key[:, :, :wide], value[:, :, :wide], None, scaling=kwargs["scaling"]
        )

    monkeypatch.setitem(AttentionInterface._global_mapping, FAKE, top_left)
    with pytest.raises(target.ConfigError, match="logits differ from those of a plain pass"):
        SpeculativeDecoder(model)
