"""Cards of all drafter types: metadata that can be parsed again, matching commands, no unfilled fields."""

from itertools import pairwise
from pathlib import Path

import pytest
from conftest import make_llama
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from unit.eval.made import evaluation, row

from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.formats.common import RARE_IN_SGLANG, SGLANG, VLLM, vllm_type
from draftsmith.heads.formats.writers import LAYOUTS
from draftsmith.hub.model_card import is_local, without_local_names, write_card
from draftsmith.train.recipe import parse_recipe


def _saved(
    kind: str, folder: Path, target: LlamaForCausalLM, name: str, revision: str | None = None, **values: object
) -> Path:
    drafter = HEADS[kind].from_target(target)
    drafter.attach(target)
    recipe = {"name": "x", "output": "o", "drafter": {"type": kind}, "target": {"model": name}, **values}
    recipe["train"] = {"optimizer": "adamw", "learning_rate": 1e-3, **recipe.get("train", {})}
    stored = parse_recipe(recipe, "test").model_dump(mode="json")
    made_for = describe_target(target, None, name) | {"revision": revision}
    save_drafter(drafter, folder, target=made_for, recipe=stored, draft_length=2)
    return folder


def test_every_kind_has_a_card(tmp_path: Path) -> None:
    target = make_llama(num_hidden_layers=6)
    assert VLLM.keys() - {"dspark"} == LAYOUTS["vllm"].keys()
    assert SGLANG.keys() == LAYOUTS["sglang"].keys()
    assert [vllm_type("dflash", options) for options in ({}, {"markov_rank": 4})] == ["dflash", "dspark"]
    for kind in HEADS:
        data = {"data": {"prompts": "org/prompts"}}
        folder = _saved(kind, tmp_path / kind, target, "org/target", **data)
        write_card(folder, None, None, repo="user/name", licence="mit")
        card = (folder / "README.md").read_text()
        assert "{" not in card.replace("--speculative-config '{", "").replace("mix: {}", "").replace("options: {}", "")
        found = ModelCard(card).data.to_dict()
        assert found["base_model"] == "org/target"
        assert found["base_model_relation"] == ("finetune" if kind == "draft_model" else "adapter")
        assert found["datasets"] == ["org/prompts"]
        assert found["tags"] == ["speculative-decoding", "draftsmith", kind]
        assert ("--format vllm" in card) == (kind in VLLM)
        assert (f'"method": "{VLLM.get(kind, {}).get("method")}"' in card) == (kind in VLLM)
        named = kind in SGLANG and kind not in RARE_IN_SGLANG
        assert (f"--speculative-algorithm {SGLANG.get(kind)} " in card) == named
        assert ("--format sglang" in card) == named
        assert 'from_pretrained("org/target")' in card
        count = sum(value.numel() for value in load_file(folder / "model.safetensors").values())
        assert f"| drafter | `{kind}`, {count:,} numbers in safetensors |" in card


def test_a_card_names_all_sources_of_a_mixture(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    listed = [{"prompts": "org/a", "share": 3, "response": "text"}, {"prompts": "/home/b.jsonl"}]
    listed.append({"prompts": "self", "kind": "code"})
    folder = _saved("medusa", tmp_path / "d", tiny_target, "org/target", data={"prompts": listed})
    write_card(folder, None, None)
    card = (folder / "README.md").read_text()
    assert ModelCard(card).data.to_dict()["datasets"] == ["org/a"]
    sources = (
        "`org/a` (60 %, the data's responses), `b.jsonl` (20 %, sampled responses), `self` of kind `code` "
        "(20 %, sampled responses)"
    )
    assert f"Trained with draftsmith on {sources}, with responses sampled from the target at temperature 1," in card


def test_a_card_says_that_states_were_stored(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    data = {"prompts": "org/prompts", "response": "text"}
    teacher = {"kind": "files", "file": "org/states"}
    folder = _saved("medusa", tmp_path / "d", tiny_target, "org/target", data=data, teacher=teacher)
    write_card(folder, None, None)
    card = (folder / "README.md").read_text()
    assert "states came from stored files. Saved is the drafter with the highest tau on held-out prompts" in card
    assert ModelCard(card).data.to_dict()["datasets"] == ["org/prompts"], "and not the folder of states"
    assert "Not measured yet: `draftsmith eval --target org/target --drafter" in card


def test_engines_are_started_by_names_that_they_know(tmp_path: Path) -> None:
    """DSpark is a dflash drafter with its own options, and a target in a local folder has no name for engines."""
    target = make_llama(num_hidden_layers=6)
    drafter = HEADS["dflash"].from_target(target, markov_rank=4)
    drafter.attach(target)
    made_for = describe_target(target, None, "/a/folder")
    save_drafter(drafter, tmp_path / "d", target=made_for, recipe=None, draft_length=2)
    write_card(tmp_path / "d", None, None)
    card = (tmp_path / "d" / "README.md").read_text()
    assert 'vllm serve TARGET --speculative-config \'{"method": "dspark",' in card
    assert "/a/" not in card


def test_what_was_measured_stands_with_its_conditions(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    folder = _saved("medusa", tmp_path / "d", tiny_target, "embedded")
    guards = [{"guard": "text", "message": "differs"}]
    rows = [row(), row(temperature=1.0, lossless=False, batch_size=8), row(drafter="other", speedup=9.0)]
    of_another = "other (chain) at T=0: speedup 9.00 above tau 1.00"
    guards.append({"guard": "speedup-above-tau", "message": of_another})
    notes = ["quiet?", "d (chain) at T=0 is slower than the target alone (0.90x).", f"{of_another}, too", "other: no"]
    write_card(folder, evaluation(rows=rows, guards=guards, notes=notes).as_json(), "d")
    card = (folder / "README.md").read_text()
    assert "| 1 | chain:draft_length=2 (LOSSY) | 8 |" in card
    assert "9.00×" not in card
    assert "**Something is wrong (text)**: differs" in card
    assert "- quiet?\n- d (chain) at T=0 is slower" in card
    for text in (card, (folder / "eval.json").read_text()):
        assert "9.00 above" not in text
        assert "other: no" not in text
    assert "2 prompts (p.jsonl), at most 96 new tokens" in card
    assert 'load_target("embedded")' in card
    assert "base_model" not in ModelCard(card).data.to_dict()
    assert (folder / "plots" / "speedup.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="drafter=nobody has no rows"):
        write_card(folder, evaluation().as_json(), "nobody")


def test_a_card_has_the_steps_that_ran(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    folder = _saved("medusa", tmp_path / "d", tiny_target, "embedded", train={"steps": 200})
    losses = [{"step": n, "loss": 1.0, "alpha": []} for n in range(1, 201)]
    for metrics, said in (
        (losses, "; 200 steps of 16 sequences"),
        (losses[:70], "; 70 of 200 planned steps of 16 sequences"),
    ):
        write_card(folder, None, None, metrics=metrics)
        assert said in (folder / "README.md").read_text().replace("\\", "")


def test_the_usage_fits_the_target(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for name, template, inputs in (
        ("org/target", "{{ messages[0].content }}", "tokenizer.apply_chat_template(chat, add_generation_prompt=True,"),
        ("org/target", None, 'tokenizer("The sky is blue because", return_tensors="pt")'),
        ("embedded", None, 'tokenizer("def main(", return_tensors="pt")'),
    ):
        folder = tmp_path / f"{name.replace('/', '-')}-{template is None}"
        _saved("medusa", folder, tiny_target, name)
        tiny_tokenizer.chat_template = template
        tiny_tokenizer.save_pretrained(folder)
        write_card(folder, None, None)
        card = (folder / "README.md").read_text()
        assert f"inputs = {inputs}" in card
        assert card.count("inputs = ") == 1, "both examples read the same prompt"


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [("/models/mine", None, ""), ("org/target", None, ", revision `main`"), ("org/target", "v2", ", revision `v2`")],
)
def test_a_local_target_has_no_revision(
    name: str, revision: str | None, said: str, tmp_path: Path, tiny_target: LlamaForCausalLM
) -> None:
    folder = _saved("medusa", tmp_path / "d", tiny_target, name, revision)
    write_card(folder, None, None)
    assert f"\n| target | `{name.removeprefix('/models/')}`{said}, weights" in (folder / "README.md").read_text()


def test_a_card_shows_names_as_text(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    """Markup in the names of target, revision, prompts and drafters, wherever the card has them."""
    nasty = "x\n```\n# owned ![i](http://h/i.png) <b> `c` \x1b]0;t\x07"
    data = {"data": {"prompts": f"/p/{nasty}"}}
    folder = _saved("medusa", tmp_path / "d", tiny_target, f"/t/{nasty}", nasty, **data)
    rows = [row(drafter=nasty, policy=nasty)]
    write_card(
        folder, evaluation(rows=rows, notes=[nasty], guards=[{"guard": nasty, "message": nasty}]).as_json(), nasty
    )
    card = (folder / "README.md").read_text()
    assert "\x1b" not in card.partition("\n---\n")[2]
    tokens = MarkdownIt("commonmark").enable("table").parse(card.partition("\n---\n")[2])
    inside = [child for token in tokens for child in token.children or ()]
    headings = [token.content for opened, token in pairwise(tokens) if opened.type == "heading_open"]
    assert not any(heading.startswith("owned") for heading in headings)
    assert [token.attrs["src"] for token in inside if token.type == "image"] == [
        f"plots/{name}.png" for name in ("speedup", "acceptance")
    ]
    html = [token.content for token in [*tokens, *inside] if token.type.startswith("html")]
    assert all("summary" in part or "details" in part for part in html), html


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/home/me/my data/p.jsonl", "p.jsonl"),
        ("~/models/llama", "llama"),
        (r"C:\Users\me\p.jsonl", "p.jsonl"),
        ("hybrid:drafter=/home/me/run/drafter", "hybrid:drafter=drafter"),
        (
            "draftsmith eval --target /home/me/t --drafter d=~/run/drafter",
            "draftsmith eval --target t --drafter d=drafter",
        ),
        ("d --prompts '/home/al s/my data/a b' -x=/home/me/y", "d --prompts 'a b' -x=y"),
        ("d 'd=~/a b/c' 'data={prompts: /a b/c d, count: 8}' /x/y", "d 'd=c' 'data={prompts: c d, count: 8}' y"),
        ("""'/home/al/o'"'"'brien x/it'"'"'s' /x/y""", """'it'"'"'s' y"""),
        (r"""d's "/home/al s/x y" and t's 'C:\a b\c': 3 tokens/s""", """d's "x y" and t's 'c': 3 tokens/s"""),
        ("'a /' / '/' 'b", "'a /' / '/' 'b"),
        ("100 tokens/s on https://host/path, 3 / 4", "100 tokens/s on http://ENGINE:8000/path, 3 / 4"),
        (
            "eval server HTTP://me:key@10.0.0.2:8123 'urls=[http://a,http://[fe80::1]:8/v1]'",
            "eval server http://ENGINE:8000 'urls=[http://ENGINE:8000,http://ENGINE:8000/v1]'",
        ),
        (
            "https://huggingface.co/org/model, https://huggingface.co.",
            "https://huggingface.co/org/model, https://huggingface.co.",
        ),
        ("http://huggingface.co.corp/x http://huggingface.co:8/y", "http://ENGINE:8000/x http://ENGINE:8000/y"),
        ("org/model", "org/model"),
    ],
)
def test_paths_of_this_machine_and_addresses_are_cut(text: str, published: str) -> None:
    assert without_local_names({"key": [text, 1, None], text: 2}) == {"key": [published, 1, None], published: 2}


def test_names_of_the_hub_are_told_from_local_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "target").mkdir(parents=True)
    local = ("runs/target", "data/p.jsonl", "./x/y", "embedded", "a/b/c", "/a/b", "~/x")
    assert [is_local(name) for name in local] == [True] * len(local)
    assert not is_local("org/target")
