"""The error of a conversation that can't be trained on as it is."""


class ConversationError(ValueError):
    """A conversation can't be trained on as it is; the message begins with its file and line."""

    def __init__(self, message: str) -> None:
        # Lone surrogates, which a conversation may have, can't be printed.
        super().__init__(message.encode(errors="backslashreplace").decode())
