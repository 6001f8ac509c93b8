"""The options that commands share, and the settings that they become."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest

from draftsmith import cli
from draftsmith.cli import eval
from draftsmith.cli.demo import DemoRequest
from draftsmith.cli.generate import GenerateRequest
from draftsmith.cli.options import settings_of
from draftsmith.eval.forecast.forecast import ForecastSettings
from draftsmith.eval.lossless.check import CheckSettings
from draftsmith.eval.settings import Settings

OWN = {command.callback.__name__: command.callback for command in cli.app.registered_commands if command.callback}
COMMANDS = {
    OWN["check"]: [CheckSettings],
    OWN["forecast"]: [ForecastSettings],
    eval.evaluate: [Settings],
    eval.serve: [Settings],
    OWN["generate"]: [GenerateRequest],
    OWN["demo"]: [DemoRequest],
}
"""Commands that pass options on by name, and the settings that take them."""


@dataclass(frozen=True)
class Example:
    seed: int = 0
    count: int = 1
    drafters: tuple[str, ...] = ()


def test_options_of_the_same_name_are_passed_on() -> None:
    assert settings_of(Example, {"seed": 3, "drafter": "x"}, drafters=("y",)) == Example(3, 1, ("y",))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_no_option_is_dropped(command: Callable[..., Any]) -> None:
    """Each option is the name of a setting, or is read in the command."""
    body = ast.parse(inspect.getsource(command)).body[0]
    assert isinstance(body, ast.FunctionDef)
    read = {node.id for line in body.body for node in ast.walk(line) if isinstance(node, ast.Name)}
    taken = {field.name for kind in COMMANDS[command] for field in fields(kind)}
    assert not set(inspect.signature(command).parameters) - read - taken
