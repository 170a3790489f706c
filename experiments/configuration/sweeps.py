"""Names of the jobs of a sweep."""

import re
from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser


def swept(overrides: Iterable[str], arguments: list[str]) -> str:
    """Name of a sweep's job: its overrides of what the command line sweeps over.

    Hydra's own `override_dirname` holds all overrides, and so may be too long for a file system,
    and a name with `=` or `,` in it would need quotes in `hydra.run.dir=FOLDER`.
    """
    parser = OverridesParser.create()
    # What is no override is an option of Hydra's.
    given = parser.parse_overrides([text for text in arguments if "=" in text and text[0] != "-"])
    keys = {override.key_or_group for override in given if override.is_sweep_override()}
    own = [text.lstrip("+") for text in overrides]
    name = "_".join(sorted(text for text in own if text.partition("=")[0] in keys))
    return re.sub(r"[^\w.-]", "_", name.replace("=", "-")) or "single"
