"""The descendants of a process: its child processes, their children, and so on."""

from pathlib import Path


def descendants(pid):
    """Return the process ids and the command lines of the descendants of ``pid``."""
    parents, words = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(folder.name)] = int(parent)
        words[int(folder.name)] = command.replace("\0", " ")
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return {one: words.get(one, "") for one in found[1:]}
