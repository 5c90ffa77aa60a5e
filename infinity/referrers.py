"""Search for variables that keep an object alive."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FrameType, FunctionType, ModuleType, TracebackType

_NO_USERS = ("infinity.", "torch.distributed.fsdp.", "IPython.", "ipykernel.", "traitlets.")
"""Packages whose objects do not count as users, because they manage or only display an object."""
_SHOWN = re.compile(r"_+\d*|Out|_oh")
"""Variables in which interactive interpreters keep recent outputs."""
_PASSED_OVER = (ModuleType, FrameType, TracebackType)
"""Types that the search does not follow: modules are searched separately, and inactive frames belong to exceptions
and debuggers.
"""


def variables_of(target: object, apart: Sequence[type] = ()) -> list[str]:
    """Return the variables of running functions and of modules through which Python code can reach `target`.

    The search takes about one second per million objects. It does not find references held only by C code, such as
    the autograd graph of a loss.

    Args:
        target: object to search for.
        apart: classes whose objects are not followed.
    """
    modules = {name: module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)}
    main = vars(sys.modules["__main__"])
    shown = {name: value for name, value in main.items() if _SHOWN.fullmatch(name)}
    seen = {id(vars(module)) for module in modules.values()} | {id(shown.get("Out"))}
    near = [*_running(), *((name, "", value) for name, value in main.items() if name not in shown)]
    far = (
        (name, f" of {place}", value)
        for place, module in modules.items()
        if not _serves(place) and place != "builtins" and vars(module) is not main  # these are already in `near`
        for name, value in list(vars(module).items())
    )
    for variables in (near, far):
        leading = [
            f"`{name}`{place}"
            for name, place, value in variables
            if _leads(value, target, seen, (*_PASSED_OVER, *apart))
        ]
        if leading:
            return list(dict.fromkeys(leading))
    return []


def _running() -> Iterator[tuple[str, str, object]]:
    """Yield (name, description of the place, value) for the variables of all running functions, innermost first."""
    frames = sys._current_frames()
    own = frames.pop(threading.get_ident(), None)
    for start in (own, *frames.values()):
        frame = start
        while frame is not None:
            place = str(frame.f_globals.get("__name__"))
            if frame.f_code.co_name != "<module>" and not _serves(place):
                for name, value in frame.f_locals.items():
                    yield name, f" of {frame.f_code.co_name}()", value
            frame = frame.f_back


def _leads(value: object, target: object, seen: set[int], passed: tuple[type, ...]) -> bool:
    """Return whether `value` is the target or refers to it, possibly indirectly. Objects in `seen` are not followed."""
    found = False
    stack = [value]
    while stack:
        item = stack.pop()
        if item is target:
            found = True
            continue
        if id(item) in seen or not gc.is_tracked(item):
            continue
        seen.add(id(item))
        kind = type(item)
        if issubclass(kind, passed) or _serves(item.__module__ if kind is FunctionType else kind.__module__):
            continue
        stack += gc.get_referents(item)
    return found


@lru_cache
def _serves(module: object) -> bool:
    return f"{module}.".startswith(_NO_USERS)
