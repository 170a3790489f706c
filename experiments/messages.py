"""Messages of errors, for a line that names the place."""


def one_line(error: BaseException) -> str:
    """The message of an error without its line breaks; its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
