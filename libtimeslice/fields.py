"""What a field of a message may be: its limits, and the checks that keep them.

Each check returns the value of a field, or raises ProtocolError (`bad_request`) that names the
field and the rule. The messages themselves are in `libtimeslice.protocol`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from libtimeslice.errors import ProtocolError

#: A decoded frame. Its values are of any msgpack type until a `*_untrusted` function checked them.
Message = dict[str, Any]

MAX_ID = (1 << 63) - 1
MAX_GROUPS = 64
#: Characters in the name of a group, phase, queue, capability or progress field.
MAX_NAME = 128
#: Characters in any other string: ids of jobs, sessions and leases, names of clients, field values.
MAX_TEXT = 1024
MAX_SECRET = 256
MAX_CAPS = 64
MAX_FIELDS = 64
#: Characters in a string that a job reports of itself; a history keeps thousands of them.
MAX_FIELD_TEXT = 256
MAX_RANKS = 1 << 20
MAX_SLURM_DIGITS = 10
MAX_EVENTS = 10_000
#: Longest time-out that may be asked for, in seconds (about 31 years); use null for "no limit".
MAX_TIMEOUT_S = 1e9
#: A client that promised more would be cut off by every hiccup of its machine.
MIN_HEARTBEAT_S = 0.1
#: Unix seconds of an instant, year 5138.
MAX_INSTANT = 1e11
#: Names by which events may be chosen, of each kind.
MAX_CHOICES = 64
MAX_PID = 1 << 22
MAX_UID = (1 << 32) - 2

# bool is a subclass of int, and `True` is no count: hence `__class__ is int` throughout.


def refuse_field(message: Message, field: str, rule: str) -> NoReturn:
    raise ProtocolError(
        f"field {field!r} of {message.get('t', 'reply')!r:.80} {rule}",
        code="bad_request",
        request_id=id_or_none(message),
    )


def id_or_none(message: Message) -> int | None:
    found = message.get("id")
    return found if found.__class__ is int and 0 < found <= MAX_ID else None


def id_field(message: Message) -> int:
    found = message.get("id")
    if found.__class__ is int and 0 < found <= MAX_ID:
        return found
    refuse_field(message, "id", "must be a positive integer")


def int_field(message: Message, field: str, least: int, most: int) -> int:
    value = message.get(field)
    if value.__class__ is int and least <= value <= most:
        return value
    refuse_field(message, field, f"must be an integer from {least} to {most}")


def optional_int_field(message: Message, field: str, least: int, most: int) -> int | None:
    return None if message.get(field) is None else int_field(message, field, least, most)


def number_field(message: Message, field: str, least: float, most: float) -> float:
    value = message.get(field)
    # A comparison with NaN is false, so NaN is refused here as well.
    if value.__class__ in (float, int) and least <= value <= most:
        return value
    refuse_field(message, field, f"must be a number from {least} to {most}")


def optional_number_field(message: Message, field: str, least: float, most: float) -> float | None:
    return None if message.get(field) is None else number_field(message, field, least, most)


def flag_field(message: Message, field: str, absent: bool | None = None) -> bool:
    value = message.get(field, absent)
    if isinstance(value, bool):
        return value
    refuse_field(message, field, "must be true or false")


def is_name(value: object) -> bool:
    # Names end up in log lines and reports: no line breaks, no terminal control codes.
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def name_field(message: Message, field: str) -> str:
    value = message.get(field)
    if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable():
        return value
    refuse_field(message, field, f"must be 1 to {MAX_NAME} printable characters")


def text_field(message: Message, field: str) -> str:
    value = message.get(field)
    if not (isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()):
        refuse_field(message, field, f"must be 1 to {MAX_TEXT} printable characters")
    return value


def optional_text_field(message: Message, field: str) -> str | None:
    return None if message.get(field) is None else text_field(message, field)


def names_field(message: Message, field: str, most: int, *, least: int = 1) -> tuple[str, ...]:
    values = message.get(field)
    if not (isinstance(values, list) and least <= len(values) <= most):
        refuse_field(message, field, f"must be a list of {least} to {most} names")
    for value in values:
        # As `is_name` has it: with one name the call would cost as much as the rest.
        if not (isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()):
            refuse_field(message, field, f"must hold names of 1 to {MAX_NAME} printable characters")
    return tuple(values)


def choices_field(message: Message, field: str) -> tuple[str, ...]:
    values = message.get(field)
    if values is None:
        return ()
    if not (isinstance(values, list) and len(values) <= MAX_CHOICES):
        refuse_field(message, field, f"must be a list of at most {MAX_CHOICES} names")
    for value in values:
        if not (isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()):
            refuse_field(message, field, f"must hold 1 to {MAX_TEXT} printable characters each")
    return tuple(values)


def groups_field(message: Message) -> tuple[str, ...] | None:
    if message.get("groups") is None:
        return None
    groups = names_field(message, "groups", MAX_GROUPS)
    if len(groups) > 1 and len(set(groups)) != len(groups):
        refuse_field(message, "groups", "names a group twice")
    return groups
