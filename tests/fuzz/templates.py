"""Chat templates that raise or write what is no text; and commands that render them."""

from hypothesis import strategies as st

from fuzz.damage import TEXTS, as_json, broken, changed, encoded
from fuzz.material import TEMPLATE, Material
from fuzz.running import Case

PIECES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% generation %}{% endgeneration %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ raise_exception('') }}",
    "{{ raise_exception('no\nlines') }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ 1 / 0 }}",
    "{{ messages[9].content }}",
    "{{ nothing.at.all }}",
    "{{ 'a' * 100000000 }}",
    "{{ [1] + 3 }}",
    "{{ messages | map('length') | sum }}",
    "{% set x = namespace(a=1) %}{% set x.b.c = 2 %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ '\ud800' }}".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    '{{ "\\ud800" }}',
    "{% include 'x' %}",
    "{{ messages[0]['content'].foo() }}",
    "{% if %}",
    "{{ (((((((((((((1))))))))))))) }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% for m in messages %}" * 30 + "{% endfor %}" * 30,
    "{% if add_generation_prompt %}a{% endif %}",
    "{{ strftime_now(3) }}",
    "{{ messages | tojson }}",
    "\x1b]0;x\x07",
)


@st.composite
def template_cases(draw: st.DrawFn, material: Material) -> Case:
    pieces = st.sampled_from(PIECES)
    text = draw(st.one_of(st.lists(pieces, max_size=4).map("".join), broken(TEMPLATE.encode()), TEXTS))
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    rows = [draw(changed(row)) if draw(st.booleans()) else row]
    files: dict[str, bytes] = {
        "t.jinja": text if isinstance(text, bytes) else encoded(text),
        "p.jsonl": b"".join(as_json(one) + b"\n" for one in rows),
    }
    options = draw(st.sampled_from([[], [], ["x=[1"], ["messages=3"], ["tokenize=true"], ["a=b", "conversation=x"]]))
    options = [word for option in options for word in ("--template-option", option)]
    target = ["--target", material.target, "--chat-template", "t.jinja", *options]
    commands = (
        "data preview p.jsonl",
        "data preview p.jsonl",
        "data regenerate p.jsonl --out out/new.jsonl --response-tokens 4",
        "check --drafter suffix --prompts p.jsonl --tokens 500 --temperature 0",
    )
    return Case("template", [*draw(st.sampled_from(commands)).split(), *target], files)
