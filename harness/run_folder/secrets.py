"""The words of a command without secrets, so that a run folder may hold them.

A secret is recognized by its name (an option, a variable or a field that is called token, key or password),
as the user in an address, or by the prefix that the tokens of a service have.
"""

import re
from collections.abc import Sequence

HIDDEN = "..."
_NAMES = {
    *("token", "key", "keys", "secret", "secrets", "password", "passwd", "passphrase", "pass", "pwd", "pat"),
    *("auth", "authorization", "credential", "credentials", "bearer", "cookie"),
}
"""Words that make the name that holds them a secret's, as hub_token, apiKey and WANDB_API_KEY; the names
tokenizer and max_tokens hold none of them."""
_JOINED = ("apikey", "authkey", "accesskey", "secretkey", "token", "password", "passwd", "secret")
"""Endings that make a name without separators a secret's, as myapikey."""
_SHORT = ("-k", "-u")
"""The short options that many programs have for a key and for user:password."""
_OPTION = re.compile(r"-{1,2}([A-Za-z][\w.-]*)(=)?", re.ASCII)
"""An option at the beginning of a word: its name, and whether its value follows in the same word."""
_ASSIGNED = re.compile(r"""([A-Za-z][\w.-]*)(["']?\s*[=:]\s*["']?)(?!//)([^\s"',;}&]+)""", re.ASCII)
"""A name and its value anywhere in a word, as in KEY=value, "key": "value" and Header: value."""
_FOLLOWED = re.compile(r"(?<!\S)-{1,2}([A-Za-z][\w.-]*)(\s+)([^-\s]\S*)", re.ASCII)
"""An option and its value within one word, which is then a line of a shell."""
_USER = re.compile(r"(://)[^/\s@]+@")
"""The user, and perhaps the password, in an address."""
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
"""A credential as an HTTP Authorization header has it."""
_OF_SERVICES = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|sk_live_|xox[abeoprs]-|npm_|pypi-|nvapi-|r8_|dop_v1_|AKIA|ASIA"
    r"|AIza|ya29\.|wandb_v\d_|api_org_)[\w-]{8,}|\beyJ[\w-]+\.[\w-]+\.[\w-]+"
)
"""Tokens by the prefixes of Hugging Face, GitHub, GitLab, OpenAI and others, Stripe, Slack, npm, PyPI,
NVIDIA, Replicate, DigitalOcean, AWS, Google, Weights & Biases, and JSON Web Tokens (RFC 7519)."""


def without_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command, with "..." in place of each secret in them."""
    shown: list[str] = []
    secret_follows = False
    for word in command:
        option = _OPTION.match(word)
        if secret_follows and not word.startswith("-"):
            shown.append(HIDDEN)
        elif option is not None and option[2] and _is_secret(option[1]):
            shown.append(f"{option[0]}{HIDDEN}")
        else:
            shown.append(_without(word))
        is_option = option is not None and option[0] == word
        secret_follows = is_option and (word in _SHORT or (option is not None and _is_secret(option[1])))
    return shown


def _without(word: str) -> str:
    """A word without the secrets in it, whether it is a line of a shell, a variable, a header, an address or
    JSON."""
    word = _USER.sub(rf"\1{HIDDEN}@", word)
    word = _SCHEME.sub(rf"\1 {HIDDEN}", word)
    for named in (_ASSIGNED, _FOLLOWED):
        word = named.sub(_without_value, word)
    return _OF_SERVICES.sub(HIDDEN, word)


def _without_value(found: re.Match[str]) -> str:
    name, _, value = found.groups()
    return found[0].removesuffix(value) + HIDDEN if _is_secret(name) else found[0]


def _is_secret(name: str) -> bool:
    """Whether what has this name is a secret."""
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    words = re.split(r"[^a-z0-9]+", parts.lower())
    return not _NAMES.isdisjoint(words) or any(word.endswith(_JOINED) for word in words)
