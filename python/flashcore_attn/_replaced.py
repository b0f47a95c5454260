"""A function of PyTorch in whose place another one stands, and what others see of that."""

from __future__ import annotations

import functools
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._errors import UnsupportedError

__all__ = ["Replacement"]

_lock = threading.Lock()


class Replacement:
    """Stands in the place of a function of PyTorch, with its name, module, documentation and signature.

    It is an object and no function: a pickle holds the name that PyTorch's users know, and loads what has that name
    then. As a function of C, it does not become a method where a class has it as an attribute.
    """

    def __init__(self, module: str, name: str, is_own: Callable[[Any], bool]) -> None:
        self._place = (module, name)
        self._is_own = is_own  # whether a function is PyTorch's
        #: PyTorch's function, from the first `enable` on.
        self.original: Any = None
        #: Whether calls are routed.
        self.active = False
        self._depth = 0  # the number of calls of `enable` without a matching `disable`
        self._placed = False  # another library's function may stand in front
        self._lent = 0  # the number of calls during which the original stands in its own place

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (":".join(self._place),)

    def __repr__(self) -> str:
        return f"<FlashCore in place of {self.path}>"

    @property
    def path(self) -> str:
        """The name of the function, with its module."""
        return ".".join(self._place)

    def in_place(self) -> bool:
        """Whether callers that look the function up find this one."""
        return self._found() is self

    def check(self) -> None:
        """Refuses to stand in front of another library's function: a call of it may mean something else."""
        found = self._found()
        if found is not self and not self._placed and not self._is_own(found):
            by = f"{getattr(found, '__module__', '?')}.{getattr(found, '__qualname__', repr(found))}"
            words = f"{self.path} is replaced by {by}, and compat takes the place of PyTorch's own only"
            raise UnsupportedError(f"{words}; enable compat before the other library", "replaced")

    def enable(self) -> None:
        """Puts it into place. Calls nest."""
        # PyTorch lists the functions that may be overridden once: now, with its own function in place.
        sys.modules["torch"].overrides.get_overridable_functions()
        with _lock:
            self._depth += 1
            self.active = True
            found = self._found()
            # Somebody may have put PyTorch's function back since the last call. Another library's function
            # stays: it may call this one.
            if self._lent == 0 and self._is_own(found):
                functools.update_wrapper(self, found)  # type: ignore[arg-type]
                self.original = found
                self._put(self)

    def disable(self) -> None:
        """Undoes one `enable`. The last one restores the function. Without one it does nothing."""
        with _lock:
            self._depth = max(self._depth - 1, 0)
            self.active = self._depth > 0
            if self.active or self.original is None:
                return
            # Another library may have replaced the function after `enable`. Its function stays.
            found = self._found()
            if found is self or found is self.original:
                self._put(self.original)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The original in its own place: a class or a mode that overrides functions compares them with what it finds
        there. Meanwhile the calls of other threads are PyTorch's."""
        with _lock:
            self._lent += 1
            if self._found() is self:
                self._put(self.original)
        try:
            yield
        finally:
            with _lock:
                self._lent -= 1
                if self._lent == 0 and self.active and self._found() is self.original:
                    self._put(self)

    def _found(self) -> Any:
        return getattr(sys.modules[self._place[0]], self._place[1])

    def _put(self, function: Any) -> None:
        self._placed = self.active
        setattr(sys.modules[self._place[0]], self._place[1], function)
