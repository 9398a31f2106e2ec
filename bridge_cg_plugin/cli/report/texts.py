"""The text of a file that a command line names."""

from pathlib import Path

from bridge_cg_plugin.options import OptionError


def text_of(path: Path, errors: str = "strict") -> str:
    """Return a file's text.

    Args:
        path: The file.
        errors: What becomes of bytes that are no UTF-8; see `str.decode`.

    Raises:
        OptionError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or f"it is no text: {error}"
        raise OptionError.because("run", f"Cannot read {path}: {why}.") from None
