"""Words of texts."""

IGNORED = ("a", "an", "and", "on", "or", "the", "s", "o")


def stem(word):
    """A word without the s of its plural; short words and those in ss stay."""
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def split(text):
    """The runs of letters and digits, in small letters."""
    found = []
    word = ""
    for letter in text.lower() + " ":
        if letter.isalnum():
            word += letter
        elif word:
            found.append(word)
            word = ""
    return found


def words(text):
    """The words of a text that are looked for."""
    return [stem(word) for word in split(text) if word not in IGNORED]
