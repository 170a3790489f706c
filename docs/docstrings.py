"""What a docstring says, for the pages that are made of the code."""

import inspect
import re


def sections(docstring: str | None) -> dict[str, dict[str, str]]:
    """Sections of a docstring in Google's style that explain names: what they say of each."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"\n(?=\w[\w ]*:\n {4})", inspect.cleandoc(docstring or "")):
        head, _, body = part.partition(":\n")
        if head in ("Attributes", "Args"):
            entries = re.split(r"\n(?= {4}\S)", "\n" + body)
            pairs = (entry.partition(": ")[::2] for entry in entries if entry.strip())
            found[head] = {name.strip(): " ".join(text.split()) for name, text in pairs}
    return found


def summary(docstring: str | None) -> str:
    """First sentence of a docstring."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())
