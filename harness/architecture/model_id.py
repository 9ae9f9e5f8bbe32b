"""Finds the config.json of a recipe's `model`, for every command by the same rule. Imports no torch.

A model is a name in recipes/models, the path of a file or of a checkpoint folder, or a Hugging Face id. For
an id only the config is fetched, a few kB, unless it is in the cache. HF_HUB_OFFLINE=1 forbids fetching.
"""

import os
import re
from pathlib import Path

from harness.architecture.config_file import MAX_CONFIG_BYTES, read_config
from harness.errors import InputError
from harness.recipe import find_model_config, list_models, nearest_model
from harness.system import hub_unreached

_ID = re.compile(r"([\w.-]{1,96}/)?[\w.-]{1,96}", re.ASCII)  # the lengths are those of huggingface_hub
_OFF = {"0", "", "OFF", "NO", "FALSE"}
"""Values of HF_HUB_OFFLINE that do not forbid anything."""


def find_config(model: str) -> Path:
    """The path of the model's config.json, which is fetched if it is not on this machine.

    Raises InputError if `model` is no name, no file and no id, and for an id whose config cannot be fetched.
    """
    here = config_here(model)
    if here is not None:
        return here
    if model.endswith(".json") or not _may_be_id(model):
        raise InputError(
            f"model: {model}: there is no such file. Give a name from recipes/models, a config.json, a "
            f"checkpoint folder or a Hugging Face id.{nearest_model(model)}"
        )
    shipped = shipped_config(model)
    return _fetched(model) if shipped is None else shipped


def shipped_config(model: str) -> Path | None:
    """The config in recipes/models of the model with the Hugging Face id `model`, or of the base model of an
    instruction-tuned one; None if there is none. With it a gated id needs no network.
    """
    if "/" not in model:
        return None
    plain = _plain(model)
    try:
        paths = [path for name in list_models() if (path := find_model_config(name)) is not None]
    except InputError:  # installed without recipes
        return None
    for path in paths:
        if path.stem == plain:
            return path
    return next(
        (path for path in paths if _plain(str(read_config(path).get("_name_or_path"))) == plain), None
    )


def _plain(model: str) -> str:
    """The name in an id, in lower case and without the parts that only say how the weights were tuned."""
    name = model.rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"-(instruct|it|chat)(?=-|$)", "", name)


def config_here(model: str) -> Path | None:
    """The path of the model's config.json if it is on this machine; else None. Fetches nothing."""
    named = find_model_config(model)
    if named is not None:
        return named
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return path / "config.json"
    if os.path.exists(path):  # a pipe too, which read_config refuses
        return path
    cached = _in_cache(model.replace("/", "--")) if _may_be_id(model) else []
    return max(cached, key=lambda path: path.lstat().st_mtime, default=None)


def _may_be_id(model: str) -> bool:
    return not model.startswith((".", "/", "~")) and _ID.fullmatch(model) is not None


def _in_cache(pattern: str) -> list[Path]:
    """The configs in the Hugging Face cache of ids that match `pattern`, in which "--" stands for "/"."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return [*hub.glob(f"models--{pattern}/snapshots/*/config.json")]


def _without_network() -> str:
    """A sentence that says what to give in place of an id whose config cannot be fetched."""
    names = {path.parents[2].name.removeprefix("models--") for path in _in_cache("*")}
    cached = sorted(name.replace("--", "/") for name in names)
    ids = f", an id in the cache ({', '.join(cached[:3])})" if cached else ""
    return f"Give a name that `harness models` lists{ids}, or the path of a config.json."


def _fetched(model: str) -> Path:
    """The config of the id `model`, fetched into the cache from the Hub, or from where HF_ENDPOINT points."""
    hint = nearest_model(_plain(model))
    if "/" in model:  # the id may well exist, and only its config cannot be fetched
        hint = hint.replace("Did you mean", "The nearest name in recipes/models is").replace("?", ".")
    nowhere = (
        f"model: {model}: there is no such name in recipes/models, no such file, and no config of that name "
        f"in the Hugging Face cache.{hint}"
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in _OFF:
        raise InputError(f"{nowhere} HF_HUB_OFFLINE forbids to fetch it. {_without_network()}")
    if hint and "/" not in model:  # a misspelt name of recipes/models
        raise InputError(f"{nowhere} Give the path of a config.json, or an id as owner/name.")
    import huggingface_hub
    from huggingface_hub import errors

    unreached = hub_unreached(huggingface_hub.hf_hub_url(model, "config.json"))
    if unreached:
        raise InputError(f"{nowhere} It could not be fetched: {unreached}. {_without_network()}")
    try:
        info = huggingface_hub.hf_hub_download(model, "config.json", dry_run=True)  # pyright: ignore[reportUnknownMemberType]
        if (info.file_size or 0) > MAX_CONFIG_BYTES:
            raise InputError(f"model: {model}: its config.json has more than {MAX_CONFIG_BYTES:,} bytes.")
        return Path(huggingface_hub.hf_hub_download(model, "config.json"))  # pyright: ignore[reportUnknownMemberType]
    except InputError:
        raise
    except errors.GatedRepoError:
        why = "it is gated: accept its licence on the Hub and log in (`hf auth login`)"
    except errors.RepositoryNotFoundError:
        why = "the Hub has no such model, or shows it only to who is logged in (`hf auth login`)"
    except errors.RemoteEntryNotFoundError:
        why = "that repository has no config.json (it may hold an adapter, or another format)"
    except Exception as error:  # every kind of failing network, of two libraries
        why = f"the Hub broke off ({type(error).__name__}); check the network, or HF_ENDPOINT"
    raise InputError(f"{nowhere} It could not be fetched: {why}. Or give the path of a config.json.")
