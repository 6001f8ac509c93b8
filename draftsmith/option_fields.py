"""The options of a command: the fields of its settings, and of the recipe sections that they contain."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from draftsmith.config import FieldPath, Section, section_in
from draftsmith.reading import parse_assignment


@dataclass(frozen=True)
class Option:
    """Metadata of a field: how the command line shows it, where its name, type and description do not say it.

    Args:
        name: instead of `--field-name`.
        also: further names.
        kind: the type of the value, or values, that are typed.
        parse: returns the field's value for what is typed and the option's name.
        argument: whether it has a place instead of a name.
        required: whether it has to be given although the field has a default.
        help: instead of the description.
        check: called with a value and the option's name; raises ConfigError, for example for a file that is missing.
        hub: as `check`; it may ask the Hub, and is called when all options are valid.
    """

    name: str = ""
    also: tuple[str, ...] = ()
    kind: Any = None
    parse: Callable[[Any, str], Any] | None = None
    argument: bool = False
    required: bool = False
    help: str | None = None
    check: Callable[[Any, str], object] | None = None
    hub: Callable[[Any, str], object] | None = None


def assignments(entries: list[str], name: str) -> dict[str, Any]:
    """Return `key=value` entries, such as `enable_thinking=false`, as a dict of YAML values."""
    return dict(parse_assignment(f"{name} {entry}", entry) for entry in entries)


def only(value: Any, name: str) -> tuple[Any, ...]:
    """Return one value for a field of several."""
    return (value,)


class Options(dict[str, "Option | Options"]):
    """Metadata of a field that is a section: which of its fields are options, in this order, and their form."""

    def __init__(self, *names: str, **forms: "Option | Options") -> None:
        super().__init__({name: Option() for name in names} | forms)


class OptionField(NamedTuple):
    """A field that is an option."""

    path: FieldPath
    field: FieldInfo
    form: Option
    default: Any
    """`...` where it is required."""
    switch: FieldPath | None = None
    """The field without which its section is left out."""

    @property
    def name(self) -> str:
        """What users write: `--count`, or the name of an argument."""
        return self.form.name or ("" if self.form.argument else "--") + str(self.path[-1]).replace("_", "-")


def option_fields(kind: type[Section]) -> list[OptionField]:
    """Return the options of a command with these settings, with those of their sections in place."""
    return list(_fields(kind, Options(*(kind.options or kind.model_fields)), (), None, optional=False))


def _fields(
    kind: type[Section], forms: Mapping[str, Option | Options], path: FieldPath, default: Any, *, optional: bool
) -> Iterator[OptionField]:
    """Yield the options in a section; `default`: the section's, where it has another one than its class."""
    switch = next((name for name, field in kind.model_fields.items() if field.is_required()), "")
    for name, given in forms.items():
        field, place = kind.model_fields[name], (*path, name)
        form = given if given != Option() else _metadata(field)
        value = ... if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        if default is not None:
            value = getattr(default, name)
        if isinstance(form, Option):
            value = ... if form.required else value
            yield OptionField(place, field, form, value, (*path, switch) if optional else None)
        else:
            inherited = None if value is ... else value
            yield from _fields(section_in(field), form, place, inherited, optional=value is None)


def _metadata(field: FieldInfo) -> Option | Options:
    return next((one for one in field.metadata if isinstance(one, Option | Options)), Option())


def check_options(settings: Section, key: Callable[[FieldPath], str] = lambda path: str(path[-1])) -> None:
    """Raise ConfigError, with the name that `key` returns, for a file, a folder or a model that is missing.

    The Hub is asked last.
    """
    fields = option_fields(type(settings))
    for late in (False, True):
        for path, _, form, *_ in fields:
            value, check = settings, form.hub if late else form.check
            for name in path:
                value = getattr(value, str(name), None)
            if check is not None and value is not None:
                check(value, key(path))
