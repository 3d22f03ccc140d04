"""Commands that take records: each field of a dataclass is an option, defined once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from inspect import Parameter
from typing import Any

Command = Callable[..., None]


def takes_records(without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorates a command: parameters that are dataclasses become options, one for each field.

    A field is annotated as typer wants it: `Annotated[type, typer.Option(…)]`. A record that is a
    parameter's default gives the defaults of this command.

    Args:
        without: fields that are no options of this command; they keep their defaults. `name.field`
            is of the record `name` alone.
    """

    def decorate(command: Command) -> Command:
        records: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        options: list[Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            hint, default = parameter.annotation, parameter.default
            if not is_dataclass(hint):
                options.append(_option(name, hint, default))
                continue
            expanded = [
                option
                for option in _options(hint, default)
                if not {option.name, f"{name}.{option.name}"} & set(without)
            ]
            make: Any = hint if default is Parameter.empty else functools.partial(replace, default)
            records[name] = make, [option.name for option in expanded]
            options += expanded

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, (make, names) in records.items():
                values[name] = make(**{field: values.pop(field) for field in names})
            command(**values)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        return run

    return decorate


def _options(record: Any, defaults: Any) -> Iterator[Parameter]:
    for field in fields(record):
        default = field.default if defaults is Parameter.empty else getattr(defaults, field.name)
        yield _option(field.name, field.type, default)


def _option(name: str, hint: Any, default: Any) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
