"""Ctrl-C in the middle of a run: at once while nothing has moved, at the end of the step after that."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType


class Interrupts:
    """Holds a Ctrl-C back while a step is half done; a second one comes through at once.

    Outside the main thread, where signals do not arrive, and outside its `with` block it does nothing but remember.

    Attributes:
        held: whether a step is half done: what the run holds in memory is then not to be kept.
    """

    def __init__(self) -> None:
        self.held, self._waiting = False, False
        self._before: Any = None

    @property
    def waiting(self) -> bool:
        """Whether a Ctrl-C is held back."""
        return self._waiting

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                signal.signal(signal.SIGINT, self._arrived)
        return self

    def __exit__(self, *error: object) -> None:
        if callable(self._before):
            signal.signal(signal.SIGINT, self._before)
        self._before = None

    def hold(self) -> None:
        """From here on a step is half done."""
        self.held = True

    def release(self) -> None:
        """The step is done; a Ctrl-C that came meanwhile arrives now.

        Raises:
            KeyboardInterrupt: if one came.
        """
        self.held = False
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.held and not self._waiting:
            self._waiting = True
            return
        self._before(number, frame)
