"""The one exception type that a user is meant to read."""


class UserError(Exception):
    """Something the user gave is wrong and the user can put it right.

    The message is a single line that names the file, key or flag and says what would be right. The command line
    prints it on stderr and exits with status 2; it never comes with a traceback.

    Attributes:
      public: the message without the file that it is about: what a server may tell a stranger.
    """

    def __init__(self, message: str, *, file: str | None = None):
        """The message, which begins with the file if there is one."""
        super().__init__(message if file is None else f"{file}: {message}")
        self.public = message
