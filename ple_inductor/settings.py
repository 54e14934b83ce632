"""What a user can set: the options of the backend and the environment variable ``PLE_INDUCTOR``.

Both are read at each compile, never at import. The backend has one option of its own,
``ple_inductor.strict``; every other one is Inductor's and is passed on. A new option is a constant in
``OWN`` and a field of `Options`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

log = logging.getLogger(__name__)

ENVIRONMENT = "PLE_INDUCTOR"
STRICT = "ple_inductor.strict"
OWN = (STRICT,)

_ON = ("1", "true", "on")
_OFF = ("0", "false", "off")
_warned: set[str] = set()


def is_off() -> bool:
    """Whether ``PLE_INDUCTOR`` switches everything off.

    Neither on nor off is one warning, and counts as unset; so does an empty value, without the warning.
    """
    value = os.environ.get(ENVIRONMENT, "")
    word = value.strip().lower()
    if word and word not in _ON + _OFF and value not in _warned:
        _warned.add(value)
        log.warning("%s=%s is ignored; expected one of %s", ENVIRONMENT, value, ", ".join(_ON + _OFF))
    return word in _OFF


@dataclass(frozen=True)
class Options:
    """A compile's ``options``, sorted by whom they are for.

    Args:
        strict: Raise while compiling when a candidate is left as it is; None where it was not given.
        inductor: Inductor's own, as they were given.
    """

    strict: bool | None
    inductor: dict[str, Any]


def read_options(options: Mapping[str, Any] | None) -> Options:
    """Sort ``options``.

    Raises:
        ValueError: A key is neither Inductor's nor ours; the text suggests the nearest one.
        TypeError: ``ple_inductor.strict`` is not a bool.
    """
    given = without_own(options)
    strict = next((value for key, value in (options or {}).items() if _name(key) == STRICT), None)
    if strict is not None and not isinstance(strict, bool):
        raise TypeError(f"option {STRICT} is {strict!r}; expected True or False")
    if given:
        _check_known(given)
    return Options(strict, given)


def without_own(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """``options`` without ours, unchecked: what stock Inductor is given when everything is off."""
    return {key: value for key, value in (options or {}).items() if _name(key) not in OWN}


def _check_known(given: Mapping[str, Any]) -> None:
    from torch._inductor import list_options

    known = [*OWN, *list_options()]
    for key in given:
        name = _name(key)
        if name in known:
            continue
        suffix = [full for full in known if full.endswith(f".{name}")]
        near = suffix or get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else "torch._inductor.list_options() lists Inductor's"
        raise ValueError(f"unknown option {key!r} for backend 'ple_inductor'; {advice}")


def _name(key: str) -> str:
    """Inductor takes a dash for an underscore."""
    return key.replace("-", "_")
