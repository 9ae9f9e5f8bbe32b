"""What a program loads and is not here: weights are zeros, and a model that harness knows has its config.

A folder, or an id of the Hub in the cache, that has a config and no weights: transformers gets a file of
zeros of the names, shapes and dtype that the config says (harness/zeros). Nothing is downloaded for it. An id
that is not here at all and cannot be fetched has the config of recipes/models, and a tokenizer of bytes. Each
is said once. With a transformers that lacks the functions replaced here, as 4.37 does, none of this is done.
"""

import os
import sys
from pathlib import Path

CONFIG = "config.json"
_said = set()


def begin_to_load(modeling_utils):
    original = getattr(modeling_utils, "_get_resolved_checkpoint_files", None)
    if original is None:
        return

    def resolved(pretrained_model_name_or_path, *args, **kwargs):
        if pretrained_model_name_or_path is None or kwargs.get("gguf_file"):
            return original(pretrained_model_name_or_path, *args, **kwargs)
        here = {**(kwargs.get("download_kwargs") or {}), "local_files_only": True}
        try:
            return original(pretrained_model_name_or_path, *args, **{**kwargs, "download_kwargs": here})
        except OSError:
            config = _config_of(str(pretrained_model_name_or_path), here)
            weights = None if config is None else _weights(str(pretrained_model_name_or_path), config)
        if weights is None:
            return original(pretrained_model_name_or_path, *args, **kwargs)
        return [weights], None

    modeling_utils._get_resolved_checkpoint_files = resolved


def begin_to_fetch(hub):
    original = getattr(hub, "cached_files", None)
    if original is None:
        return

    def cached_files(path_or_repo_id, filenames, *args, **kwargs):
        if not os.path.isdir(path_or_repo_id):
            _leave_a_silent_hub_alone()
        failed = None
        try:
            found = original(path_or_repo_id, filenames, *args, **kwargs)
        except OSError as error:
            found, failed = None, error
        if not found:
            folder = _unfetched(hub, str(path_or_repo_id))
            there = [] if folder is None else [folder / name for name in filenames]
            found = [str(path) for path in there if path.exists()] or found
        if failed is not None and not found:
            if CONFIG in filenames and not os.path.isdir(path_or_repo_id):
                _say(
                    f"{path_or_repo_id} unknown",
                    f"{path_or_repo_id} is not here. `harness checkpoint CONFIG --out DIR` makes a folder of "
                    "zeros of any model's config.json: give the program that.",
                )
            raise failed
        return found

    hub.cached_files = cached_files


def _config_of(model, download):
    """The config.json of a folder, or of an id in the cache, or of one that stands in for it."""
    from transformers.utils.hub import cached_file

    quietly = {name: download[name] for name in ("cache_dir", "revision", "subfolder") if name in download}
    try:
        found = cached_file(model, CONFIG, local_files_only=True, **quietly)
    except OSError:
        return None
    return None if found is None else Path(found)


def _weights(model, config):
    zeros = _harness()
    if zeros is None:
        return None
    try:
        weights = zeros.stand_in_folder(config) / "model.safetensors"
    except zeros.InputError as error:
        _say(model, f"the weights of {model} are not here, and zeros cannot take their place: {error}")
        return None
    _say(
        model, f"the weights of {model} are not here: zeros take their place. Memory does not depend on them."
    )
    return str(weights)


def _unfetched(hub, model):
    """The folder that stands in for an id of which nothing is here; None for a folder, and for what is."""
    from huggingface_hub import try_to_load_from_cache

    if "/" not in model or os.path.exists(model) or isinstance(try_to_load_from_cache(model, CONFIG), str):
        return None
    zeros = _harness()
    config = None if zeros is None else zeros.shipped_config(model)
    if config is None:
        return None
    folder = zeros.stand_in_folder(config)
    _say(
        f"{model} unfetched",
        f"{model} is not here and could not be fetched. In its place are the config that harness has of it "
        f"({config.stem}), zeros as weights, and a tokenizer with a token for each byte, with which texts "
        "are longer than with its own.",
    )
    return folder


def _leave_a_silent_hub_alone():
    """Asked once: without a network its libraries would try half a minute for each file."""
    if "hub" in _said:
        return
    _said.add("hub")
    zeros = _harness()
    unreached = "" if zeros is None else zeros.hub_unreached()
    if unreached:
        zeros.hub_left_alone()
        _say("no hub", f"{unreached}. What is in its cache is used.")


def _harness():
    """What is needed of harness; None where this interpreter cannot import it."""
    folder = os.environ.get("VIRTUAL_GPU_HARNESS")
    if folder is None:
        return None
    sys.path.append(folder)
    try:
        import harness.zeros as zeros
    except ImportError:
        return None
    finally:
        sys.path.remove(folder)
    return zeros


def _say(about, sentence):
    if about not in _said and os.environ.get("RANK", "0") == "0":
        print(f"virtual GPU: {sentence}", file=sys.stderr)
    _said.add(about)
