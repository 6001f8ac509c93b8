"""`draftsmith check`: a test of losslessness on this machine, with an exit code."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith.cli.options import (
    AttentionOption,
    CompileOption,
    CountOption,
    DtypeOption,
    ImagesOption,
    InvariantOption,
    JsonOption,
    MeasuredOption,
    PromptsOption,
    RuleOption,
    SeedOption,
    TargetOption,
    TemperaturesOption,
    TemplateOption,
    TemplateOptionsOption,
    TopKOption,
    TopPOption,
    TrustOption,
    at_least_one,
    checked_drafters,
    checked_policy,
    measuring,
    print_json,
    suggest,
    template_options,
)
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.reading import read_json

if TYPE_CHECKING:
    from draftsmith.eval.lossless.check import Check, CheckSettings
    from draftsmith.eval.prompts import PromptRows

EXIT_CODES = {"lossless": 0, "lossy": 1, "inconclusive": 3}
"""By verdict; 2 is bad input, as in every command."""
LEAST_TOKENS = 500


def check(
    target: TargetOption,
    drafter: MeasuredOption,
    prompts: PromptsOption = "embedded",
    count: CountOption = 12,
    temperature: TemperaturesOption = None,
    gamma: Annotated[
        int | None, typer.Option("--gamma", help="Draft length; default: each drafter's own.", callback=at_least_one)
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="As for `draftsmith eval`; repeatable.", callback=checked_policy),
    ] = None,
    rule: RuleOption = None,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens to sample; as many for the control.", callback=at_least_one)
    ] = 10_000,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    images: ImagesOption = None,
    dtype: DtypeOption = "float32",
    attn_implementation: AttentionOption = None,
    compile: CompileOption = False,
    invariant: InvariantOption = False,
    trust_remote_code: TrustOption = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for check.json.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Test that decoding with drafters is lossless. Exit code 0: lossless, 1: lossy, 3: inconclusive."""
    if tokens < LEAST_TOKENS:  # before torch is imported
        raise ConfigError.of("tokens", tokens, f">= {LEAST_TOKENS}")
    drafters = checked_drafters(drafter)
    from draftsmith.eval.lossless.check import CheckSettings

    settings = CheckSettings(
        target=target,
        drafters=drafters,
        prompts=prompts,
        count=count,
        temperatures=tuple(temperature or (0.0, 1.0)),
        draft_length=gamma,
        policies=tuple(policy or ()),
        rule=rule,
        tokens=tokens,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chat_template=chat_template,
        template_options=template_options(template_option),
        images=images,
        dtype=dtype,
        attn_implementation=attn_implementation,
        compile=compile,
        invariant=invariant,
    )
    rows = _validated(settings, out)
    if out is None:
        checked = _run(settings, rows, out, trust_remote_code, as_json)
    else:
        from draftsmith.locks import hold_folder

        with hold_folder("out", out):
            _require_folder(settings, out)
            checked = _run(settings, rows, out, trust_remote_code, as_json)
    if checked.verdict == "lossless" and not as_json:
        suggest("draftsmith", "eval", *measuring(target, drafter, prompts))
    raise typer.Exit(EXIT_CODES[checked.verdict])


def _validated(settings: "CheckSettings", out: Path | None) -> "PromptRows":
    """Return the rows of the prompts; ConfigError for settings that cannot be checked."""
    from draftsmith.eval.prompts import PromptRows
    from draftsmith.eval.settings import require_valid

    if not settings.drafters:
        raise ConfigError("drafter is missing; expected at least one")
    require_valid(settings, counts={"gamma": [settings.draft_length], "count": [settings.count]}, out=out)
    if settings.draft_length is not None and settings.policies:
        raise ConfigError(f"gamma={settings.draft_length} and policy={settings.policies[0]}; expected one of the two")
    return PromptRows.read(settings.prompts, images=settings.images)


def _require_folder(settings: "CheckSettings", out: Path) -> None:
    """Raise ConfigError if `out` holds the results of a check with other settings."""
    from draftsmith.eval.settings import require_same_settings

    file = out / "check.json"
    if not file.exists():
        return
    try:
        before = dict(read_json(file)["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"out={out} holds a check.json that is not ours; expected another folder") from error
    require_same_settings(before, settings, out, "check")


def _run(
    settings: "CheckSettings", rows: "PromptRows", out: Path | None, trust_remote_code: bool, as_json: bool
) -> "Check":
    """Load, check and print; the results so far are written to `out` after each drafter and temperature.

    Raises:
        DraftsmithError: after printing, if the results could not be written.
    """
    from draftsmith.eval.lossless.check import check
    from draftsmith.eval.settings import load_session
    from draftsmith.storage import write_json, writing

    session = load_session(settings, rows, trust_remote_code=trust_remote_code)
    problem: DraftsmithError | None = None

    def keep(so_far: "Check") -> None:
        nonlocal problem
        if out is None:
            return
        try:
            with writing(out / "check.json", "the results are printed above"):
                write_json(out / "check.json", so_far.as_json())
        except DraftsmithError as error:
            problem = error
        else:
            problem = None

    checked = check(session.target, session.drafters, session.prompts, settings, keep=keep)
    if as_json:
        print_json(checked.as_json())
    else:
        _show(checked, out if problem is None else None)
    if problem is not None:
        raise problem
    return checked


def _show(checked: "Check", out: Path | None) -> None:
    from draftsmith.eval.lossless.check import sampling_table, sentences
    from draftsmith.safe_text import Terminal

    console = Terminal(width=None if Terminal().is_terminal else 110)
    for arm in checked.arms:
        if arm.sampling is not None:
            console.print(sampling_table(arm, arm.sampling))
    for sentence in sentences(checked):
        console.print(sentence)
    if out is not None:
        console.print(f"evidence: {out / 'check.json'}")
