"""The one exception type that a user is meant to read."""


class UserError(Exception):
    """Something the user gave is wrong and the user can put it right.

    The message is a single line that names the file, key or flag and says what would be right. The command line
    prints it on stderr and exits with status 2; it never comes with a traceback.
    """
