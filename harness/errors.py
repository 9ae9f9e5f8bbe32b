"""The failures a user can cause or meet, each with the exit status the command line gives it."""


class HarnessError(Exception):
    """A failure explained in one paragraph: what, where, and what to do about it."""

    exit_status = 1


class InputError(HarnessError):
    """The recipe, a file or an argument is wrong, or the recipe cannot work on this machine."""

    exit_status = 2


class MissingDependency(InputError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str | None, needed_for: str) -> None:
        install = f"pip install 'harness[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{needed_for} needs the package {package}, which is not installed. Run: {install}")
