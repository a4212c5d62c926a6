"""An interrupt wherever the interpreter may deliver one in the steps of some modules: one run for each place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType


def interrupted(run: Callable[[], None], module: ModuleType) -> Iterator[int]:
    """Run until nothing is left to interrupt; yields the number of the place after each run that was.

    Signals are looked for where a function begins and when a call of one that is written in C is over, so that is where
    it is raised: a trace function could do so before any step, also between two that nothing comes between.
    """
    files = {module.__file__, contextlib.__file__}
    place = 0
    while True:
        place += 1
        left = place

        def profile(frame: FrameType, event: str, _arg: object) -> None:
            nonlocal left
            if frame.f_code.co_filename in files and event in ("call", "c_return"):
                left -= 1
                if not left:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            run()
        except KeyboardInterrupt:
            pass
        else:
            assert left > 0
            return
        finally:
            sys.setprofile(before)
        yield place
