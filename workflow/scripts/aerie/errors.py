"""The one exception for bad input and bad state, and the one way to describe any exception."""

import traceback


class AerieError(Exception):
    """Something the user can mend: the message says what was found, what was expected and what to do."""


class Terminated(BaseException):
    """The job was told to end (SIGTERM). No `except Exception` takes it for a fault of the row or the layer at hand."""


def describe(error: BaseException) -> str:
    """One paragraph for a person: type, message (the repr when it is empty), where it was raised, and its causes.

    Never empty, whatever the exception's own text is.
    """
    lines = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = type(current).__name__
        text = str(current).strip() or f"(no message; {current!r})"
        if isinstance(current, AerieError | Terminated):
            lines.append(text)
        else:
            frames = traceback.extract_tb(current.__traceback__)
            place = f"\n  raised in {frames[-1].filename}:{frames[-1].lineno}, {frames[-1].name}" if frames else ""
            lines.append(f"{kind}: {text}{place}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\ncaused by ".join(lines)
