"""The command line. Commands import their packages when they run: help and errors do not wait for torch."""

import _thread
import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from pydantic import Field

from draftsmith import __version__
from draftsmith.cli.check_command import check
from draftsmith.cli.data import data_app
from draftsmith.cli.eval import eval_app, forecast
from draftsmith.cli.examples import add_examples
from draftsmith.cli.options import Json, checked_recipe, flag, print_json, suggest, with_settings
from draftsmith.cli.publish import export, import_, push
from draftsmith.config import Count, Section
from draftsmith.errors import REMOVED, ConfigError, DraftsmithError, one_line, reason_of, removed
from draftsmith.eval.settings import DemoSettings, PromptSettings
from draftsmith.names import require_free_port
from draftsmith.option_fields import Option
from draftsmith.storage import require_folder
from draftsmith.terminal import printable, quiet_imports
from draftsmith.train.estimate.gpus import machine_named, room_on


class _Interrupted(Exception):
    """Ctrl-C in a command, with its message: typer makes an exit code of a KeyboardInterrupt."""


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise _Interrupted(str(stop) or "interrupted") from stop


app = typer.Typer(
    cls=_Commands,
    help="Train drafters for speculative decoding on a frozen target, and measure acceptance and speedup.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
TRAIN, MEASURE, PUBLISH = "Train", "Measure and decode", "Publish"
"""Groups of commands in `--help`."""
RecipeArgument = Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe (`draftsmith recipes`).")]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="section.key=value; overrides the file.")]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"draftsmith {__version__}")
        raise typer.Exit


LOOP = """\
A drafter from prompts to publication:

  data      draftsmith data preview PROMPTS --target TARGET
  train     accelerate launch -m draftsmith.train RECIPE
  eval      draftsmith eval --target TARGET --drafter FOLDER --prompts HELDOUT
  forecast  draftsmith forecast --target TARGET --drafter FOLDER --prompts HELDOUT
  push      draftsmith push FOLDER USER/NAME --eval runs/eval

draftsmith quickstart   does all of it on this machine with a small target of its own, in a few minutes
draftsmith recipes      lists recipes for published targets, and one for any target by drafter
draftsmith --help       lists every command\
"""


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback prints it
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print version.", metavar="")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(LOOP)


@app.command(rich_help_panel=TRAIN)
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Folder for runs and the report.")] = Path("runs/quickstart"),
) -> None:
    """Train two drafters for the embedded target, a small model that writes Python, and measure both."""
    require_folder("out", out)
    from draftsmith.cli.quickstart import quickstart as run

    run(out)


@app.command(rich_help_panel=TRAIN)
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
) -> None:
    """Train a drafter in this process. Several processes: accelerate launch -m draftsmith.train RECIPE."""
    from draftsmith.train.process import launch_variables

    launch_variables()  # before torch is loaded
    checked = checked_recipe(recipe, overrides)
    from draftsmith.train.trainer import train as run

    typer.echo(printable(f"drafter: {run(checked)}"))


class Memory(Section):
    """A recipe, and the processes and the GPU that `draftsmith memory` estimates it for."""

    recipe: Annotated[str, Option(argument=True)]
    """A YAML file, or a shipped recipe (`draftsmith recipes`)."""
    overrides: Annotated[list[str], Option(argument=True)] = Field(default_factory=list)
    """section.key=value; overrides the file."""
    processes: Count = 1
    """Processes that share a batch."""
    sharded: bool = False
    """Estimate for FSDP2 or ZeRO."""
    on: Annotated[str | None, Option(check=machine_named)] = None
    """A GPU, such as h100 or 4090: does the run fit, how long does it take?"""


UNCOUNTED = (
    "  computed from operations and bytes; kernel launches and Python come on top, most of all while a small target "
    "samples, and with --sharded the layers that each pass gathers"
)
SERVED_NOTE = (
    "  that is for data.prompts with the answers of an engine that serves the target in 4 bits, and needs host memory "
    "for the target in 16 bits: docs/guide/scale.md#a-target-that-fits-only-in-4-bits"
)


@app.command(rich_help_panel=TRAIN)
@with_settings
def memory(settings: Memory, as_json: Json = False) -> None:
    """Estimate the memory (and time) of a recipe in each process from the target's config, without its weights."""
    recipe, given, processes, sharded = settings.recipe, [*settings.overrides], settings.processes, settings.sharded
    checked = checked_recipe(recipe, given, read_prompts=False)
    checked.require_divisible(processes)
    machine, target = None if settings.on is None else machine_named(settings.on), checked.target
    typer.echo(printable(f"{checked.name}: loading torch"), err=True)
    from draftsmith.heads.formats.writers import unserved
    from draftsmith.train.estimate.memory import MemoryEstimate, estimate_memory, states_sentence
    from draftsmith.train.estimate.time import SERVED, estimate_work, fitting_overrides, fitting_sentence
    from draftsmith.train.recipe import load_recipe
    from draftsmith.train.step import precision

    _, config = target.load_tokenizer()
    # All machines in the table compute bf16 in hardware, even if this one does not.
    bf16 = precision(checked.train) == "bf16" or (machine is not None and checked.train.mixed_precision == "auto")

    @cache
    def estimated(*more: str) -> MemoryEstimate:
        changed = load_recipe(recipe, [*given, *more]) if more else checked
        changed.require_divisible(processes)
        options = {"processes": processes, "sharded": sharded, "bf16": bf16, "accelerated": True if machine else None}
        return estimate_memory(changed, config, **options)

    estimate = estimated()
    seconds, lines = {}, []
    if machine is not None:
        work = estimate_work(checked, config, estimate, processes=processes, bf16=bf16)
        seconds = {"sampling": work.sampling_seconds(machine), "training": work.training_seconds(machine)}
        lines, room = [work.on(machine), UNCOUNTED], room_on(machine)
        if not as_json:
            small = estimate.announced <= room
            more = [] if small else fitting_overrides(checked, room, lambda values: estimated(*values).totals)
            needed = estimated(*more or ())
            lines.append(fitting_sentence(machine, needed, more))
            if set(SERVED) <= set(more or ()):
                lines.append(SERVED_NOTE)
            given += more or []
    if as_json:
        return print_json({"bytes": estimate.phases, "disk_bytes": estimate.disk, "seconds": seconds})
    typer.echo(f"about {estimate}")
    if checked.teacher.kind == "server":
        lines.append(states_sentence(checked, config, seconds.get("training")))
    if checked.unread_answers:
        lines.append(f"{checked.unread_answers:,} of the answers that it samples are in no step: lower data.count")
    if checked.start_from is None and (note := unserved(checked.drafter)) is not None:
        lines.append(note)
    for line in lines:
        typer.echo(line)
    launch: list[object] = []
    if processes > 1:
        from draftsmith.train.recipe import launch_configs

        # One machine's file: accelerate takes the number of processes from the option.
        launch = ["--config_file", launch_configs()["fsdp2_8gpu" if sharded else "ddp_8gpu"]]
        launch += ["--num_processes", processes]
    suggest("accelerate", "launch", *launch, "-m", "draftsmith.train", recipe, *given)


@app.command(rich_help_panel=MEASURE)
@with_settings
def generate(settings: PromptSettings) -> None:
    """Stream the continuation of a prompt; accepted draft tokens are coloured."""
    from draftsmith.cli.generate import stream

    stream(settings)


@app.command(rich_help_panel=MEASURE)
@with_settings
def demo(settings: DemoSettings) -> None:
    """Serve a page on this machine that decodes a prompt with and without the drafter, side by side."""
    require_free_port(settings.host, settings.port)  # before torch is imported
    from draftsmith.cli.demo import serve

    serve(settings)


@app.command(rich_help_panel="This machine")
def env() -> None:
    """Print versions, devices and threads for a bug report; no paths and no tokens."""
    import torch

    from draftsmith.provenance import environment, has_cxx_compiler

    found = environment()
    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    values = {"draftsmith": __version__, **found.pop("versions"), **found, "accelerators": len(memory)}
    values |= {"accelerator memory": ", ".join(f"{size / 2**30:.0f} GiB" for size in memory) or None}
    values |= {"C++ compiler": has_cxx_compiler(), "cuda": torch.version.cuda}
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):
        values[name] = os.environ.get(name)
    for name, value in values.items():
        if name != "command":
            typer.echo(printable(f"{name:22s} {value}"))


@app.command(rich_help_panel=TRAIN)
def recipes(
    name: Annotated[str | None, typer.Argument(help="Recipe to print.")] = None,
    schema: Annotated[bool, flag("--schema", "Print the JSON schema of recipes, for editors.")] = False,
) -> None:
    """List the shipped recipes, or print one, or a launch file such as accelerate/ddp_8gpu."""
    from draftsmith.train.recipe import LAUNCH_CONFIGS, Recipe, launch_configs, shipped_recipes, unknown_recipe

    if schema:
        return print_json(Recipe.model_json_schema())
    shipped = shipped_recipes()
    if name is None:
        for recipe, text in shipped.items():
            typer.echo(f"{recipe:32s} {text.splitlines()[0].lstrip('# ')}")
        return suggest("draftsmith", "recipes", "draft_model/any_prompts", to_stderr=True)
    launch = {f"{LAUNCH_CONFIGS}/{config}": path for config, path in launch_configs().items()}
    if name in launch:
        return typer.echo(launch[name].read_text(encoding="utf-8"), nl=False)
    if name not in shipped:
        raise unknown_recipe(name, [*shipped, *launch])
    typer.echo(shipped[name], nl=False)
    suggest("draftsmith", "memory", name, to_stderr=True)


app.add_typer(data_app, name="data", rich_help_panel=TRAIN)
app.add_typer(eval_app, name="eval", rich_help_panel=MEASURE)
app.command(rich_help_panel=MEASURE)(check)
app.command(rich_help_panel=MEASURE)(forecast)
app.command(rich_help_panel=PUBLISH)(export)
app.command(name="import", rich_help_panel=PUBLISH)(import_)
app.command(rich_help_panel=PUBLISH)(push)
add_examples(app)


CRASHED = 70
"""Exit code of an error that is ours: EX_SOFTWARE of sysexits.h, which no verdict has."""


PIPE_CLOSED = 141
"""Exit code of shells for a command that is ended by SIGPIPE."""


def _accept_any_text() -> None:
    """Let stdout escape characters that its encoding lacks, as stderr does, and replace a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Repeat a Ctrl-C that Python ignores because it is raised in the callback of a weak reference or in `__del__`.

    Every import runs such a callback, so that many fall into the seconds in which a target is loaded.
    """
    ignored = sys.unraisablehook

    def again(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            return ignored(unraisable)
        # After this function, which would ignore it, too.
        repeated = Timer(0.01, _thread.interrupt_main)
        repeated.daemon = True
        repeated.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = ignored


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; an error that the user can fix is printed as one line, with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _accept_any_text()
    quiet_imports()
    try:
        for argument in arguments:
            if not argument.isprintable() and argument != argument.encode(errors="replace").decode():
                raise ConfigError.of("argument", argument, "text in UTF-8")
        with _interrupts_kept():
            code = app(args=arguments, prog_name="draftsmith", standalone_mode=False) or 0
            sys.stdout.flush()
            sys.exit(code)
    except DraftsmithError as error:
        _leave(f"{type(error).__name__}: {error}")
    except BrokenPipeError:  # the reader of the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports the rest at its exit
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        # For example a name that is too long, a folder without permission, a full disk.
        _leave(f"{type(error).__name__}: {reason_of(error)}")
    except (_Interrupted, KeyboardInterrupt, typer.Abort) as stop:
        _leave(str(stop) or "interrupted", 130)
    except Exception as error:
        message = getattr(error, "format_message", None)  # errors of typer's parser
        if message is None:
            traceback.print_exc()
            sys.exit(CRASHED)
        command = getattr(getattr(error, "ctx", None), "command_path", "draftsmith")
        if (option := f"{command} {getattr(error, 'option_name', '')}") in REMOVED:
            _leave(f"ConfigError: {removed(option)}")
        _leave(f"{command}: {message()} (see {command} --help)")


def _leave(line: str, code: int = 2) -> NoReturn:
    print(one_line(printable(line), 500), file=sys.stderr)
    sys.exit(code)
