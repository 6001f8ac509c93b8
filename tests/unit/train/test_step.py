"""Gradients of the training step: encoder-decoder batches, and how far adapters follow the drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from datasets import Dataset
from torch import Tensor
from transformers import RwkvConfig, RwkvForCausalLM, T5Config, T5ForConditionalGeneration

from draftsmith.distill.cotraining import Adapters, quality_kl
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads import HEADS, DraftModel, Medusa, TrainableDrafter
from draftsmith.train.optimizers import OPTIMIZERS, Optimizers, Trained
from draftsmith.train.recipe import load_recipe
from draftsmith.train.recipe_sections import CotrainSection
from draftsmith.train.step import AgreementStep, CotrainStep, Last, collate, make_step

CPU = torch.device("cpu")
ROWS = Dataset.from_list(
    [{"input_ids": [5, 6, 7, 8, 9], "spans": [[2, 5]]}, {"input_ids": [3, 4, 2, 1], "spans": [[3, 4]]}]
)
SETTINGS = CotrainSection(warmup_fraction=0, drafter_weight=0.5, max_quality_kl=1)


def optimizers(drafter: TrainableDrafter, name: str) -> Optimizers:
    return OPTIMIZERS[name](Trained.of(drafter, weight_decay=0.0))


def test_an_encoder_reads_prompts_and_a_decoder_responses() -> None:
    batch = collate(ROWS, [0, 1], CPU, start_token=0, limit=3)
    assert batch.source_BS.tolist() == [[5, 6, 0], [3, 4, 2]]
    assert batch.source_mask_BS.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.input_ids_BT.tolist() == [[0, 7, 8, 9], [0, 1, 0, 0]]
    assert batch.mask_BT.tolist() == [[True, True, True, False], [True, False, False, False]]
    plain = collate(ROWS, [0], CPU, limit=3)
    assert plain.mask_BT.tolist() == [[False, True, True, True, False]]


STATE_DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "medusa": ({}, {}),
    "eagle": ({"train_steps": 3}, {"feature_weight": 1.0}),
    "hass": ({"train_steps": 3}, {"feature_weight": 1.0, "top_k_weight": 1.0}),
    "eagle3": ({"layers": [1, 2], "train_steps": 3}, {}),
    "mtp": ({"train_steps": 3}, {}),
    "peagle": ({"layers": [1, 2]}, {}),
    "dflash": ({"layers": [1, 2], "block_size": 4, "confidence_head": True}, {}),
}
"""Drafters that read the target's states, with options of their objective."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", STATE_DRAFTERS)
def test_no_loss_depends_on_the_state_of_a_texts_last_token(kind: str, packed: bool) -> None:
    """An engine that writes states with its answer has none of it. All tokens but the first are trained."""
    target = make_llama().requires_grad_(False)
    options, objective = STATE_DRAFTERS[kind]
    drafter = HEADS[kind].from_target(target, **options).float().train()
    texts = [[5, 6, 7, 8, 9, 11, 12], [3, 4, 2, 1, 13, 14, 15, 16]]
    rows = [{"input_ids": ids, "spans": [[1, len(ids)]]} for ids in texts]
    if packed:
        spans, lengths = [[1, 7], [8, 15]], list(map(len, texts))
        rows = [{"input_ids": [*texts[0], *texts[1]], "spans": spans, "documents": lengths}]
    teacher = OnlineTeacher(target, drafter.needs.layers)
    own = teacher.signals(collate(Dataset.from_list(rows), list(range(len(rows))), CPU))
    ends, weights = [(0, 6), (0, 14) if packed else (1, 7)], [it for it in drafter.parameters() if it.requires_grad]

    def gradients_of(value: float, before: int) -> list[Tensor]:
        """Of 8 losses, with states of this value `before` positions before the ends."""
        changed_BT1 = torch.zeros_like(own.mask_BT)[..., None]
        for row, place in ends:
            changed_BT1[row, place - before] = True
        hidden_BTH, features_BTF = (
            None if it is None else it.masked_fill(changed_BT1, value) for it in (own.hidden_BTH, own.features_BTF)
        )
        assert hidden_BTH is not None
        signals = replace(own, hidden_BTH=hidden_BTH, features_BTF=features_BTF)
        torch.manual_seed(0)  # block drafters draw the positions that they are trained at
        read = [Objective(**objective)(drafter.unroll(signals), signals, teacher.lm_head) for _ in range(8)]
        loss = torch.stack([sums.loss for sums in read]).sum()
        return [loss, *torch.autograd.grad(loss, weights, allow_unused=True)]

    for one, other in zip(gradients_of(0.0, 0), gradients_of(1e3, 0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert abs(float(gradients_of(0.0, 1)[0] - gradients_of(1e3, 1)[0])) > 0.1, "the state before it matters"


def test_heads_that_are_read_without_gradient_first_are_trained_in_bf16() -> None:
    """Older torch gives them no gradient: autocast keeps the cast of the first reading (pytorch/pytorch#165068)."""
    target = make_llama().requires_grad_(False)
    drafter = Medusa.from_target(target)
    step = AgreementStep(drafter, Objective("accepted_length"), OnlineTeacher(target))
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(collate(ROWS, [0, 1], CPU), 0.0, Last())[0]
    loss.backward()
    assert [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def gradients(settings: CotrainSection, done: float = 1.0, kl: float = 0.0) -> tuple[list[Tensor], list[Tensor]]:
    """Of the adapters and of the drafter, after one step with adapters that have moved."""
    target = make_llama().requires_grad_(False)
    drafter = Medusa.from_target(target)
    adapters = Adapters.on(target, rank=2, modules=["q_proj", "down_proj"])
    torch.manual_seed(1)
    for weight in adapters.parameters.values():
        weight.data = torch.randn_like(weight) * 0.1
    step = CotrainStep(drafter, Objective(), OnlineTeacher(target), adapters, settings)
    step(collate(ROWS, [0, 1], CPU), done, Last(None, kl))[0].backward()
    return [weight.grad for weight in step.adapters], [weight.grad for weight in drafter.parameters()]


def test_the_drafters_pull_on_the_adapters_is_weighted_and_ends_at_the_bound() -> None:
    full, drafter = gradients(SETTINGS)
    double, same_drafter = gradients(SETTINGS.model_copy(update={"drafter_weight": 1.0}))
    bound, _ = gradients(SETTINGS, kl=2.0)
    near, _ = gradients(SETTINGS, kl=0.5)
    early, warm = gradients(SETTINGS.model_copy(update={"warmup_fraction": 0.5}), done=0.1)
    assert all(torch.equal(a, b) for a, b in zip(drafter, same_drafter, strict=True)), "it learns at full speed"
    assert all(grad.abs().max() > 0 for grad in bound), "beyond the bound the KL to the original still pulls back"
    for a, b, c in zip(full, double, bound, strict=True):
        torch.testing.assert_close(b - c, 2 * (a - c), rtol=1e-3, atol=1e-4)
    for a, b, c in zip(full, near, bound, strict=True):
        torch.testing.assert_close(a - c, 2 * (b - c), rtol=1e-3, atol=1e-4)
    assert max(float((a - c).abs().max()) for a, c in zip(full, bound, strict=True)) > 1e-3
    assert not any(grad.any() for grad in early), "adapters stay where they are during the warm-up"
    assert any(grad.any() for grad in warm)


def test_the_ramp_rises_from_the_end_of_the_warm_up() -> None:
    settings = SETTINGS.model_copy(update={"warmup_fraction": 0.3})
    half, full = gradients(settings, done=0.4)[0], gradients(settings, done=0.6)[0]
    none = gradients(settings, done=0.3)[0]
    assert max(float((b - c).abs().max()) for b, c in zip(full, none, strict=True)) > 1e-3
    for a, b, c in zip(half, full, none, strict=True):
        torch.testing.assert_close(b - c, 2 * (a - c), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 100])
def test_quality_is_the_kl_from_the_original(chunk: int) -> None:
    torch.manual_seed(0)
    lm_head = torch.nn.Linear(4, 9, bias=False).double()
    original, adapted = torch.randn(2, 5, 4, dtype=torch.float64)
    adapted.requires_grad_()
    ours = quality_kl(lm_head, original, adapted, chunk)
    p, q = lm_head(original).softmax(-1), lm_head(adapted).softmax(-1)
    plain = (p * (p / q).log()).sum()
    torch.testing.assert_close(ours, plain)
    for a, b in zip(torch.autograd.grad(ours, adapted), torch.autograd.grad(plain, adapted), strict=True):
        torch.testing.assert_close(a, b)


def test_muon_takes_the_matrices_inside_the_layers() -> None:
    drafter = Medusa.from_target(make_llama())
    muon, adamw = optimizers(drafter, "muon")
    taken = {id(weight) for weight in muon.param_groups[0]["params"]}
    assert taken == {id(block[0].linear.weight) for block in drafter.blocks}
    every = {id(weight) for optimizer in (muon, adamw) for weight in optimizer.param_groups[0]["params"]}
    assert every == {id(weight) for weight in drafter.parameters()}
    (alone,) = optimizers(drafter, "adamw")
    assert len(alone.param_groups[0]["params"]) == len(list(drafter.parameters()))


def taken_by_muon(drafter: TrainableDrafter) -> set[str]:
    names = {id(weight): name for name, weight in drafter.named_parameters()}
    return {names[id(weight)] for weight in optimizers(drafter, "muon")[0].param_groups[0]["params"]}


def test_muon_takes_no_embedding_of_an_encoder_decoder() -> None:
    """T5 names its embedding `shared`, and keeps an embedding of distances in the attention of its first layers."""
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    taken = taken_by_muon(DraftModel(model))
    outside = [name for name, weight in model.named_parameters() if weight.ndim == 2 and f"model.{name}" not in taken]
    biases = [f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for part in ("encoder", "decoder")]
    assert outside == ["shared.weight", *biases]


def test_muon_takes_no_lm_head_of_another_name() -> None:
    model = RwkvForCausalLM(RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    assert {name.split(".")[2] for name in taken_by_muon(DraftModel(model))} == {"blocks"}


@pytest.mark.parametrize("transitions", [{"markov_rank": 4}, {"selector_rank": 4, "selector_top_k": 5}], ids=str)
def test_muon_takes_neither_transitions_nor_a_confidence_head(transitions: dict[str, int]) -> None:
    options = {"layers": [1, 2], "block_size": 4, "confidence_head": True, **transitions}
    drafter = HEADS["dflash"].from_target(make_llama(), **options)
    assert {name.split(".")[1] for name in taken_by_muon(drafter)} == {"fc", "layers"}


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_muon_multiplies_in_the_runs_precision(precision: str, dtype: torch.dtype, recipe_file: Path) -> None:
    """Also on machines where bf16 is fast."""
    target = make_llama().requires_grad_(False)
    recipe = load_recipe(str(recipe_file), ["train.optimizer=muon", f"train.mixed_precision={precision}"])
    _, made, _ = make_step(recipe, target, Medusa.from_target(target), OnlineTeacher(target))
    assert made[0].param_groups[0]["dtype"] == dtype
