"""Tests of the documentation: its code runs, its links exist, its commands parse, and every public name is in it."""

import ast
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from exact.one_round import EXACT, Round, Setting, the_rule
from transformers import LlamaForCausalLM
from typer.main import get_command

import draftsmith
from draftsmith import SpeculativeDecoder
from draftsmith.cli import app
from draftsmith.config import Section
from draftsmith.decode.policies import POLICIES, Chain, check_policy
from draftsmith.decode.rules import RULES, Rule, rule_named
from draftsmith.distill.load_target import load_target
from draftsmith.distill.losses import LOSSES, LossInputs, overlap
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.eval.forecast.profile import profile_from
from draftsmith.heads import HEADS
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.heads.configs import DRAFTERS, VocabularyOption
from draftsmith.train.optimizers import OPTIMIZERS, SCHEDULES
from draftsmith.train.recipe import Recipe, parse_recipe
from draftsmith.train.step import AgreementStep, Last
from draftsmith.train.validation import METRICS

ROOT = Path(__file__).parents[2]
PACKAGES = ("draftsmith", "heads", "decode", "distill", "eval", "hub", "train")
NOTES = [ROOT / "benchmarks" / "lab-log.md", ROOT / "heads" / "formats" / "layouts.md"]
"""Pages of the repository that the site does not have."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *NOTES, *sorted((ROOT / "docs").rglob("*.md"))]


def _python_blocks() -> list[str]:
    """Return the Python code on docs/extending.md, block by block."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def extending() -> SimpleNamespace:
    """Run the code on docs/extending.md and return what it defines; what it registers is removed afterwards."""
    tables = (DRAFTERS, LOSSES, SCHEDULES, OPTIMIZERS, METRICS, POLICIES, RULES)
    before, names = [dict(table) for table in tables], {"__name__": "extending"}
    for block in _python_blocks():
        exec(block, names)
    yield SimpleNamespace(**names)
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def test_the_drafter_of_the_page_learns_and_decodes(extending: SimpleNamespace, tiny_target: LlamaForCausalLM) -> None:
    assert issubclass(extending.BigramSection, Section)
    assert set(extending.BigramSection.model_fields) == {"type", "rank"}
    torch.manual_seed(0)
    drafter = extending.Bigram.from_target(tiny_target, rank=16)
    drafter.attach(tiny_target)
    teacher = OnlineTeacher(tiny_target, drafter.needs.layers)
    step = AgreementStep(drafter, Objective(kind="kl", draft_length=1), teacher)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-2)
    ids_BT = torch.randint(5, 60, (8, 24), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids_BT, torch.ones_like(ids_BT), torch.ones_like(ids_BT).bool())
    losses = []
    for _ in range(12):
        loss = step(batch, 1.0, Last([0.5]))[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    again = extending.Bigram.from_config(drafter.config())
    again.load_state_dict(drafter.state_dict())
    prompt, options = [5, 6, 7], {"max_new_tokens": 24, "eos_token_id": None}
    alone = SpeculativeDecoder(tiny_target).generate(prompt, **options).tokens
    for policy in ("chain:draft_length=3", "best-first:size=6,depth=3"):
        out = SpeculativeDecoder(tiny_target, again.eval(), policy=policy).generate(prompt, **options)
        assert out.tokens == alone
    signals = SimpleNamespace(input_ids_BT=ids_BT)
    (unrolled,) = again.unroll(signals)
    assert torch.equal(unrolled.head(unrolled.states_ND), again.lm_head(again.table(ids_BT.flatten())))


IN_FILES = {"LOSSES": "distill/losses", "SCHEDULES": "train/optimizers", "OPTIMIZERS": "train/optimizers"}
IN_FILES |= {"METRICS": "train/validation"}
"""Tables and the files in which they are."""


@pytest.mark.slow
def test_additions_take_the_files_that_the_page_names(recipe_file: Path, tmp_path: Path) -> None:
    """Write each block of the page to its file in a copy of the package, and train with all of them.

    A drafter takes two files, a loss, a schedule, an optimizer and a metric one each.
    """
    heads = shutil.copytree(ROOT / "draftsmith", tmp_path / "copy" / "draftsmith") / "heads"
    drafter, entry = _python_blocks()[:2]
    (heads / "bigram.py").write_text(drafter, encoding="utf-8")
    before, union, after = (heads / "configs.py").read_text(encoding="utf-8").partition("if TYPE_CHECKING:\n")
    entry = re.sub(r"^(from|import) .*\n", "", entry, flags=re.MULTILINE)
    (heads / "configs.py").write_text(before + entry + "\n" + union + after, encoding="utf-8")
    for table, name in IN_FILES.items():
        (block,) = (block for block in _python_blocks() if f"\n{table}[" in block)
        file = tmp_path / "copy" / "draftsmith" / f"{name}.py"
        own = re.sub(r"^from draftsmith.* import .*\n", "", block, flags=re.MULTILINE)
        file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{own}", encoding="utf-8")
    chosen = ["drafter={type: bigram, rank: 8}", "objective.kind=hellinger", "train.schedule=inverse_sqrt"]
    chosen += ["train.optimizer=sgd"]
    command = [sys.executable, "-m", "draftsmith.train", str(recipe_file), *chosen]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "copy")}
    ran = subprocess.run(command, cwd=tmp_path / "copy", env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates[1:] == pytest.approx([3e-3 * (1 + 9 * step / 11) ** -0.5 for step in range(11)])
    assert 0 <= rows[-1]["evaluation"]["full_rounds"] <= 1
    assert "optimizer: sgd, rate 0.003 (there is no default), inverse square root" in " ".join(ran.stderr.split())


def test_the_loss_of_the_page_is_a_bound_of_alpha(extending: SimpleNamespace) -> None:
    p_log, q_log = (torch.randn(200, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    ids = torch.zeros(200, dtype=torch.long)
    loss, none = (extending.hellinger(LossInputs(p_log, q, ids, ids, 0.0)) for q in (q_log, p_log))
    assert torch.allclose(none, torch.zeros(200, dtype=torch.float64))
    assert ((1 - overlap(p_log, q_log)) <= (2 * loss).sqrt() + 1e-12).all()
    assert LOSSES["hellinger"] is extending.hellinger


@pytest.mark.parametrize("seed", range(4))
def test_the_policy_of_the_page_is_exact(extending: SimpleNamespace, seed: int) -> None:
    one_round = Round(Setting(), seed)
    drafts = one_round.drafts(extending.TwoLengths(short=1, long=2, sure=0.4))
    assert {len(draft) for _, draft in drafts} <= {1, 2}
    assert one_round.gap(the_rule("token"), drafts) < EXACT
    assert str(check_policy("two-lengths:long=2")) == "two-lengths:short=1,long=2,sure=0.8"


@pytest.mark.parametrize("seed", range(4))
def test_of_the_two_rules_of_the_page_one_is_exact(extending: SimpleNamespace, seed: int) -> None:
    one_round = Round(Setting(), seed)
    drafts = one_round.drafts(Chain(2))
    wrong = Rule("wrong", partial(extending.rule, from_residual=False))
    assert one_round.gap(rule_named("page"), drafts) < EXACT
    assert one_round.gap(wrong, drafts) > 1e-3


def test_links_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page}: {link}"


def test_the_index_names_every_page() -> None:
    docs = ROOT / "docs"
    named = set(re.findall(r"\]\(([^)#\s]+)", (docs / "index.md").read_text(encoding="utf-8")))
    pages = {page.relative_to(docs).as_posix() for kind in ("*.md", "*.ipynb") for page in docs.rglob(kind)}
    assert pages - {"index.md"} <= named


def test_the_readme_has_at_most_700_words() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def yaml_blocks() -> list[tuple[str, dict[str, Any]]]:
    """Return every YAML block with the name of its page."""
    blocks = ((page, re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)) for page in PAGES)
    return [(page.name, yaml.safe_load(block)) for page, found in blocks for block in found]


@pytest.mark.parametrize(("page", "values"), yaml_blocks(), ids=lambda value: value if isinstance(value, str) else "")
def test_yaml_of_the_documentation_is_valid(page: str, values: dict[str, Any]) -> None:
    """Validate a block as a recipe, sections of a recipe, or a machine's seconds."""
    if "alone" in values:
        profile_from(values)
    else:
        parse_recipe({"name": "page", "output": "page", "drafter": {"type": "medusa"}, **values}, page)


def commands() -> list[tuple[str, str]]:
    """Return every `draftsmith …` line of a shell block with the name of its page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                call = line.strip().removeprefix("$ ")
                if call.startswith("draftsmith "):
                    found.append((page.name, call))
    return found


def test_commands_of_the_documentation_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse options and arguments as the command line does, without running the commands; what they name exists."""
    command, ran = get_command(app), list[str]()
    _stop_before_running(command, ran, monkeypatch)
    for number, (page, line) in enumerate(commands()):
        words = shlex.split(re.sub(r" > \S+$|[][…]|\.\.\.|<[^>]*>", " ", line), comments=True)[1:]  # of a synopsis
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for word in words:
            if not word.startswith(("-", "/")) and "=" not in word:
                place = folder / word
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(b"GGUF") if place.suffix else place.mkdir(exist_ok=True)
        ran.clear()
        error = CliRunner().invoke(command, words, standalone_mode=False).exception
        assert error is None or isinstance(error, SystemExit), f"{page}: {line}: {error}"
        assert ran or "--help" in words, f"{page}: {line}"


def _stop_before_running(command: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for inner in getattr(command, "commands", {}).values():
        _stop_before_running(inner, ran, monkeypatch)
    if not getattr(command, "commands", None) or getattr(command, "invoke_without_command", False):
        monkeypatch.setattr(command, "callback", lambda *_, **__: ran.append(command.name))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_is_in_the_table_and_has_a_recipe_for_any_prompts(kind: str) -> None:
    assert (ROOT / "recipes" / kind / "any_prompts.yaml").is_file()
    table = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8").partition("| `drafter.type` |")[2]
    (row,) = re.findall(rf"^\| `{kind}` \|(.*)\|$", table, re.MULTILINE)
    _, _, _, _, head, vocabulary, paper = (cell.strip() for cell in row.split("|"))
    assert head in ("own", "the target's")
    assert "20" in paper
    assert vocabulary == ("yes" if issubclass(DRAFTERS[kind].section, VocabularyOption) else "no")


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, with an untrained drafter in place of the quickstart's."""
    target = load_target("embedded")
    folder = tmp_path / "runs" / "quickstart" / "mtp" / "drafter"
    drafter, made_for = HEADS["mtp"].from_target(target.model), describe_target(target.model, None, "embedded")
    save_drafter(drafter, folder, target=made_for, recipe=None, draft_length=3)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block, {})


def test_generated_pages_are_those_of_the_code() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stale = [name for name, text in written["PAGES"].items() if (written["FOLDER"] / name).read_text("utf-8") != text()]
    assert not stale, "run `python docs/generate.py`"


def test_the_schema_has_every_key_of_a_recipe() -> None:
    printed = CliRunner().invoke(get_command(app), ["recipes", "--schema"]).stdout
    schema = json.loads(printed)
    assert schema["properties"].keys() == Recipe.model_fields.keys()
    of_drafters = schema["properties"]["drafter"]["discriminator"]["mapping"]
    assert of_drafters.keys() == DRAFTERS.keys()


def documented() -> list[str]:
    """Return the dotted names on docs/reference/api.md."""
    return re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/api.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_reference_has_every_public_name() -> None:
    names = {resolve_name(name) for name in documented()}
    missing = [name for name in draftsmith.__all__ if getattr(draftsmith, name) not in names]
    assert not missing, f"docs/reference/api.md lacks {missing}"


@pytest.mark.parametrize("name", documented())
def test_everything_in_the_reference_has_a_docstring(name: str) -> None:
    """mkdocstrings omits members without a docstring silently."""
    item = resolve_name(name)
    members = {key: value for key, value in vars(item).items() if key[0] != "_"} if inspect.isclass(item) else {}
    code = {key: value for key, value in members.items() if isinstance(value, CODE)}
    without = [key for key, value in {name: item, **code}.items() if not value.__doc__]
    assert not without, f"{name}: no docstring of {without}"
    assert not item.__doc__.startswith(f"{item.__name__}("), f"{name}: only what a dataclass gets by itself"


CODE = (FunctionType, property, cached_property, classmethod, staticmethod)


def test_every_name_on_the_page_of_the_architecture_exists() -> None:
    """Files and folders; classes and functions, wherever they are defined; arrows carry a class, or values by name."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    diagrams = "\n".join(re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL))
    places = set(re.findall(r"\b(?:[a-z_]+/)+(?:[a-z_]+\.py)?", text)) - {"guide/"}
    assert len(places) > 25
    assert not [place for place in places if not (ROOT / place).exists()]
    sources = [file for place in PACKAGES for file in (ROOT / place).rglob("*.py")]
    tree = [node for file in sources for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    classes = {node.name for node in tree if isinstance(node, ast.ClassDef)} | {"Dataset"}
    defined = classes | {node.name for node in tree if isinstance(node, ast.FunctionDef)}
    arrows = {label.strip('"').split(":")[0] for label in re.findall(r"\|([^|]+)\|", diagrams)}
    assert {name for name in arrows if re.fullmatch(r"[A-Z]\w+", name)} > {"Recipe", "DraftBatch", "VerifyResult"}
    assert not {name for name in arrows if re.fullmatch(r"[A-Z]\w+", name)} - classes
    prose = text.replace(diagrams, "")
    named = set(re.findall(r"`([A-Za-z_]+)(?:\(\w*\))?`", prose)) | set(re.findall(r"<br>([A-Z]\w+)", diagrams))
    assert len(named) > 15
    assert not named - defined


def test_contributing_names_every_folder_of_the_packages() -> None:
    named = set(re.findall(r"`([\w/]+)/`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    files = [(ROOT / package, file) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    # draftsmith/ has links to the other packages.
    own = {file.parent.relative_to(ROOT).as_posix() for package, file in files if package in file.resolve().parents}
    assert own <= named, f"CONTRIBUTING.md lacks {sorted(own - named)}"
    gone = [name for name in named if "/" in name and not (ROOT / name).is_dir()]
    assert not gone, f"CONTRIBUTING.md names folders that do not exist: {gone}"
