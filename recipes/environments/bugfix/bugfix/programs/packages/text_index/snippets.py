"""Parts of texts."""


def snippet(text, word, around):
    """A word with some words around it; dots where something is left out."""
    parts = text.split()
    if word not in parts:
        return ""
    place = parts.index(word)
    start = max(0, place - around)
    end = min(len(parts), place + around + 1)
    found = " ".join(parts[start:end])
    if start > 0:
        found = "..." + found
    if end < len(parts):
        found = found + "..."
    return found
