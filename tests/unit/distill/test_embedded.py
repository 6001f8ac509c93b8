"""The embedded corpus and its prompts."""

from collections import Counter

import pytest
from transformers import AutoTokenizer

from draftsmith.distill.embedded import code_of, embedded_prompts, embedded_target, read_modules
from draftsmith.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_target())


@pytest.mark.slow  # the training split is large
def test_no_module_is_in_both_splits():
    train, heldout = read_modules("train"), read_modules("heldout")
    assert not {module.path for module in train} & {module.path for module in heldout}
    share = sum(len(m.text) for m in heldout) / sum(len(m.text) for m in [*train, *heldout])
    assert 0.05 < share < 0.15
    assert len({module.kind for module in heldout}) >= 4


@pytest.mark.slow
def test_no_tests_and_no_other_peoples_packages_in_the_corpus():
    paths = [module.path for split in ("train", "heldout") for module in read_modules(split)]
    assert len(paths) == len(set(paths))
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.split("/"))]


def test_corpus_is_code_without_comments_and_docstrings():
    source = '"""Module."""\n# why\ndef f(x):\n    """Doc."""\n\nclass A:\n    """Doc."""\n    y = "# kept"  # no\n'
    assert code_of(source) == "def f(x):\n    pass\n\nclass A:\n    y = '# kept'\n"
    assert code_of('"""Module."""\n') == "pass\n"
    for module in read_modules("heldout"):
        assert code_of(module.text) == module.text, module.path


def test_prompts_are_deterministic_and_exact(tokenizer):
    rows = embedded_prompts(tokenizer, "heldout", count=40, prompt_tokens=24, seed=3)
    assert rows == embedded_prompts(tokenizer, "heldout", count=40, prompt_tokens=24, seed=3)
    assert rows != embedded_prompts(tokenizer, "heldout", count=40, prompt_tokens=24, seed=4)
    assert {len(row.input_ids) for row in rows} == {24}
    assert len({row.id for row in rows}) == 40
    heldout = {module.path: module for module in read_modules("heldout")}
    per_module = Counter(row.id.rsplit(":", 1)[0] for row in rows)
    assert set(per_module) <= set(heldout)
    assert max(per_module.values()) <= 2  # more than 20 held-out modules are long enough
    for row in rows:
        path, line = row.id.rsplit(":", 1)
        rest = "".join(heldout[path].text.splitlines(keepends=True)[int(line) - 1 :])
        assert rest.startswith(tokenizer.decode(row.input_ids).rstrip("\N{REPLACEMENT CHARACTER}"))
        assert row.category == heldout[path].kind


@pytest.mark.parametrize(("count", "length", "key"), [(0, 8, "count"), (1, 0, "prompt_tokens"), (1, 10**6, "count")])
def test_impossible_prompts_are_refused(tokenizer, count, length, key):
    with pytest.raises(ConfigError, match=f"^{key}="):
        embedded_prompts(tokenizer, "heldout", count=count, prompt_tokens=length)
