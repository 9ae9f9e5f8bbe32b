"""Words of a command as they may be written down: what looks like a secret is left out.

Names say it (an option, a variable, a field that is called token, key or password), addresses with a user in
them, and tokens of services that begin as only theirs do.
"""

import re
from collections.abc import Sequence

HIDDEN = "..."
_NAMES = {
    *("token", "key", "keys", "secret", "secrets", "password", "passwd", "passphrase", "pass", "pwd", "pat"),
    *("auth", "authorization", "credential", "credentials", "bearer", "cookie"),
}
"""Parts of a name, as hub_token, apiKey and WANDB_API_KEY have them; a tokenizer and max_tokens have none."""
_JOINED = ("apikey", "authkey", "accesskey", "secretkey", "token", "password", "passwd", "secret")
"""What a name may end with that is written as one word."""
_SHORT = ("-k", "-u")
"""Options that programs have for a key, and for user:password."""
_OPTION = re.compile(r"-{1,2}([A-Za-z][\w.-]*)(=)?", re.ASCII)
_ASSIGNED = re.compile(r"""([A-Za-z][\w.-]*)(["']?\s*[=:]\s*["']?)(?!//)([^\s"',;}&]+)""", re.ASCII)
_FOLLOWED = re.compile(r"(?<!\S)-{1,2}([A-Za-z][\w.-]*)(\s+)([^-\s]\S*)", re.ASCII)
"""Within one word: a line of a shell."""
_USER = re.compile(r"(://)[^/\s@]+@")
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_OF_SERVICES = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|sk_live_|xox[abeoprs]-|npm_|pypi-|nvapi-|r8_|dop_v1_|AKIA|ASIA"
    r"|AIza|ya29\.|wandb_v\d_|api_org_)[\w-]{8,}|\beyJ[\w-]+\.[\w-]+\.[\w-]+"
)
"""Hugging Face, GitHub, GitLab, OpenAI and others, Stripe, Slack, npm, PyPI, NVIDIA, Replicate, DigitalOcean,
AWS, Google, Weights & Biases; and JSON Web Tokens (RFC 7519)."""


def without_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command, with "..." where one holds a secret, or the part of it that does."""
    shown: list[str] = []
    follows = False
    for word in command:
        option = _OPTION.match(word)
        if follows and not word.startswith("-"):
            shown.append(HIDDEN)
        elif option is not None and option[2] and _is_secret(option[1]):
            shown.append(f"{option[0]}{HIDDEN}")
        else:
            shown.append(_without(word))
        whole = option is not None and option[0] == word
        follows = whole and (word in _SHORT or (option is not None and _is_secret(option[1])))
    return shown


def _without(word: str) -> str:
    """A word that may be a whole line of a shell, a variable, a header, an address or JSON."""
    word = _USER.sub(rf"\1{HIDDEN}@", word)
    word = _SCHEME.sub(rf"\1 {HIDDEN}", word)
    for named in (_ASSIGNED, _FOLLOWED):
        word = named.sub(_without_value, word)
    return _OF_SERVICES.sub(HIDDEN, word)


def _without_value(found: re.Match[str]) -> str:
    name, _, value = found.groups()
    return found[0].removesuffix(value) + HIDDEN if _is_secret(name) else found[0]


def _is_secret(name: str) -> bool:
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    words = re.split(r"[^a-z0-9]+", parts.lower())
    return not _NAMES.isdisjoint(words) or any(word.endswith(_JOINED) for word in words)
