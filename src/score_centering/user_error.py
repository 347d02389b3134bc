"""The one kind of error that is the user's to mend; every room may raise it."""


class UserError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what is allowed."""
