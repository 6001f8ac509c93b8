"""`draftsmith check`: a test of losslessness on this machine, with an exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith.cli.options import (
    AttentionOption,
    CompileOption,
    CountOption,
    ImagesOption,
    InvariantOption,
    JsonOption,
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
    checked_dtype,
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

    Keep = Callable[[Check], None]

EXIT_CODES = {"lossless": 0, "lossy": 1, "inconclusive": 3}
"""By verdict; 2 is bad input, as in every command."""
LEAST_TOKENS = 500


def check(
    target: TargetOption,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="As for `draftsmith eval`; repeatable.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="Address of a running server with speculation; without --drafter.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The server's name of the target; default: the only one it lists.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="Address of a server without speculation, instead of loading the target."),
    ] = None,
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
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Dtype of the target; default: float32, with --server bfloat16.", callback=checked_dtype
        ),
    ] = None,
    attn_implementation: AttentionOption = None,
    compile: CompileOption = False,
    invariant: InvariantOption = False,
    trust_remote_code: TrustOption = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for check.json and check.md.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Test that decoding with drafters, or a server, is lossless. Exit code 0: lossless, 1: lossy, 3: inconclusive."""
    if tokens < LEAST_TOKENS:  # before torch is imported
        raise ConfigError.of("tokens", tokens, f">= {LEAST_TOKENS}")
    drafters = _drafters(drafter, server, model, baseline)
    unused = {
        "gamma": gamma,
        "policy": policy,
        "rule": rule,
        "images": images,
        "compile": compile,
        "invariant": invariant,
    }
    if server is not None and (given := [name for name, value in unused.items() if value]):
        raise ConfigError(f"--{given[0]} with --server; expected it at the server's start")
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
        dtype=dtype or ("float32" if server is None else "bfloat16"),
        attn_implementation=attn_implementation,
        compile=compile,
        invariant=invariant,
        baseline=baseline,
    )
    rows = _validated(settings, out)

    def checking(keep: "Keep") -> "Check":
        from draftsmith.eval.lossless.check import check
        from draftsmith.eval.settings import load_session

        if server is not None:
            from draftsmith.eval.lossless.served import check_server

            return check_server(settings, rows, out, model=model, trust_remote_code=trust_remote_code, keep=keep)
        session = load_session(settings, rows, trust_remote_code=trust_remote_code)
        return check(session.target, session.drafters, session.prompts, settings, keep=keep)

    if out is None:
        checked = _run(checking, out, as_json)
    else:
        from draftsmith.locks import hold_folder

        with hold_folder("out", out):
            _require_folder(settings, out)
            checked = _run(checking, out, as_json)
    if checked.verdict == "lossless" and not as_json and drafter:
        suggest("draftsmith", "eval", *measuring(target, drafter, prompts, settings))
    raise typer.Exit(EXIT_CODES[checked.verdict])


def _drafters(drafter: list[str] | None, server: str | None, model: str | None, baseline: str | None) -> dict[str, str]:
    """Return the drafters, or the server's address, by name; ConfigError unless one of the two is given."""
    if server is None:
        if given := model or baseline:
            raise ConfigError(f"--model or --baseline={given} without --server; expected both with it only")
        if not drafter:
            raise ConfigError("--drafter is missing; expected a drafter, or a running server as --server")
        return checked_drafters(drafter)
    if drafter:
        raise ConfigError(f"--drafter={drafter[0]} with --server={server}; expected one of the two")
    from draftsmith.distill.server.settings import require_address

    for key, address in {"server": server, "baseline": baseline}.items():
        if address is not None:
            require_address(key, address)
    return {model or "server": server}


def _validated(settings: "CheckSettings", out: Path | None) -> "PromptRows":
    """Return the rows of the prompts; ConfigError for settings that cannot be checked."""
    from draftsmith.eval.prompts import PromptRows
    from draftsmith.eval.settings import require_valid

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


def _run(checking: "Callable[[Keep], Check]", out: Path | None, as_json: bool) -> "Check":
    """Check and print; the results so far are written to `out` after each drafter and temperature.

    Raises:
        DraftsmithError: after printing, if the results could not be written.
    """
    from draftsmith.eval.lossless.check import report
    from draftsmith.storage import write_json, write_text, writing

    problem: DraftsmithError | None = None

    def keep(so_far: "Check") -> None:
        nonlocal problem
        if out is None:
            return
        try:
            with writing(out / "check.json", "the results are printed above"):
                write_json(out / "check.json", so_far.as_json())
                write_text(out / "check.md", report(so_far))
        except DraftsmithError as error:
            problem = error
        else:
            problem = None

    checked = checking(keep)
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
        console.print(f"evidence: {out / 'check.md'}")
