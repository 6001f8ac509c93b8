"""Files that are downloaded (data rows, chat templates, drafters): whatever stands in them, a command works or exits 2
with one line, within 20 seconds, and changes nothing outside of its output folder.

    DRAFTSMITH_FUZZ_CASES=10000 pytest tests/fuzz -m "not slow" -s

runs that many cases in all; DRAFTSMITH_FUZZ_SEED chooses others.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from draftsmith.cli import main
from fuzz.drafter_folders import drafter_cases
from fuzz.material import Material, make
from fuzz.prompt_files import prompts_cases
from fuzz.running import Case, Unclean, run
from fuzz.templates import template_cases

CASES = int(os.environ.get("DRAFTSMITH_FUZZ_CASES", "60"))
MORE = 70
"""Times as many under `make test-slow`."""
SEED = int(os.environ.get("DRAFTSMITH_FUZZ_SEED", "0"))
KINDS = {"prompts": (prompts_cases, 0.15), "template": (template_cases, 0.1), "drafter": (drafter_cases, 0.15)}
"""Strategy of each kind of case, and its share."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    import draftsmith.cli.generate
    import draftsmith.distill.load_target
    import draftsmith.eval.evaluation
    import draftsmith.eval.forecast.command
    import draftsmith.hub.export
    import draftsmith.train.data_commands
    import draftsmith.train.trainer

    root = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        for module in (draftsmith.distill.load_target, draftsmith.hub.export):  # the real one is slower
            patch.setattr(module, "embedded_target", lambda *_: root / "target")
        # A run goes on whatever fails in its estimate of memory; `draftsmith memory` is among the commands.
        patch.setattr("draftsmith.train.estimate.memory.announce_memory", lambda context: None)
        torch.set_num_threads(1)
        yield make(root, main)


def _explore(kind: str, count: int, number: int, material: Material, folder: Path) -> None:
    """Run cases of one kind, all of them, and fail with one of each sort that is unclean."""
    found: list[Unclean] = []
    commands: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(case=KINDS[kind][0](material))
    def explore(case: Case) -> None:
        commands[" ".join(word for word in case.arguments[:2] if word.isalpha())[:20]] += 1
        problem = run(case, folder, main)
        if problem is not None:
            found.append(problem)

    explore()
    print(f"\n{kind}: {commands.total()} cases, {len(found)} unclean", dict(commands.most_common()))
    sorts = {problem.signature: problem for problem in reversed(found)}
    shown = [f"{problem.why}\n{repr(problem.case)[:3000]}\n{problem.detail}" for problem in sorts.values()]
    assert not found, f"{len(found)} of {commands.total()} cases are unclean:\n\n" + "\n\n".join(shown)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_one_line(kind: str, material: Material, tmp_path: Path) -> None:
    _explore(kind, round(CASES * KINDS[kind][1]), SEED, material, tmp_path / "case")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_bad_input_is_one_line(kind: str, material: Material, tmp_path: Path) -> None:
    _explore(kind, round(MORE * CASES * KINDS[kind][1]), SEED + 1, material, tmp_path / "case")
