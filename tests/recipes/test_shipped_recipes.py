"""Every shipped recipe goes through the real entry point, on a tiny target, and its drafter decodes."""

from pathlib import Path

import pytest
from commands import write_prompts
from conftest import make_llama, mostly_slow
from transformers import PreTrainedTokenizerFast

from draftsmith import SpeculativeDecoder, load_drafter
from draftsmith.distill.load_target import load_target
from draftsmith.train.__main__ import main
from draftsmith.train.recipe import load_recipe, shipped_recipes
from draftsmith.train.run_folder import read_metrics


@pytest.fixture
def deep_target_folder(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """Six layers, so that every drafter finds the depths that it reads."""
    folder = tmp_path / "deep-target"
    make_llama(num_hidden_layers=6).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


RECIPES = {name: load_recipe(name) for name in shipped_recipes()}
EMBEDDED = [name for name, one in RECIPES.items() if one.target.model == "embedded" and one.start_from is None]
"""tests/integration/test_distillation.py has the recipe that starts from a drafter."""
ESTIMATED = ("dspark/embedded", "medusa2/embedded")
FAST = (*ESTIMATED, "hass/embedded", "peagle/embedded", "quickstart/draft_model", "quickstart/mtp")
"""Recipes in `make test`, one for each drafter that tests/recipes/test_real_models.py does not train there; only the
runs of `ESTIMATED` estimate their memory."""


@pytest.mark.parametrize("name", mostly_slow(EMBEDDED, *FAST))
def test_a_recipe_trains_and_its_drafter_decodes(
    name: str,
    deep_target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if name in FAST and name not in ESTIMATED:
        request.getfixturevalue("without_estimate")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    prompts = write_prompts(tmp_path / "prompts.jsonl", *("abcdefgh"[i % 5 :] for i in range(24)))
    out = tmp_path / "run"
    small = (f"output={out}", f"target.model={deep_target_folder}", f"data.prompts={prompts}")
    small += ("data.response_tokens=16",)
    small += ("train.steps=2", "evaluation.count=2", "evaluation.max_new_tokens=8", "train.batch_size=8")
    if RECIPES[name].drafter.type == "dflash":  # only LiLiCorr has these layers, over all candidates of all blocks
        small += ("drafter.lilicorr_hidden_size=16", "drafter.lilicorr_factor_dim=8")
    assert main([name, *small]) == 0
    assert [row["step"] for row in read_metrics(out) if "loss" in row] == [1, 2]
    loaded = load_target(str(out / "target" if (out / "target").is_dir() else deep_target_folder))
    decoder = SpeculativeDecoder(loaded.model, load_drafter(out / "drafter", loaded.model, loaded.tokenizer))
    assert len(decoder.generate([5, 6, 7], max_new_tokens=12, eos_token_id=None).tokens) == 12


@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_a_recipes_header_tells_how_to_launch_it(name: str) -> None:
    header = shipped_recipes()[name]
    assert f"-m draftsmith.train {name}" in header
    assert "Hardware:" in header
    load_recipe(name)


def test_the_quickstarts_share_their_samples() -> None:
    """The same data section and seed make the same cache key, so that the target is sampled once."""
    recipes = [load_recipe(f"quickstart/{name}") for name in ("draft_model", "mtp")]
    assert recipes[0].data == recipes[1].data
    assert recipes[0].train.seed == recipes[1].train.seed
