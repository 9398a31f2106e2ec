"""What a process's output says of its end."""

import re


def error_in(text: str) -> str:
    """Return the error that a process's output ends with: the last line that begins with an exception's name."""
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)]
    line = re.sub(r"^\[rank\d+\]: ?", "", named[-1] if named else lines[0])
    return (f"out of memory: {line}" if "out of memory" in line.lower() else line)[:300]
