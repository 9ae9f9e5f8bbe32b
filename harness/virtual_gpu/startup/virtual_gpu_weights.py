"""Stand-ins for files that a program loads by transformers and that are not on this machine.

For a folder, or an id in the Hub's cache, that has a config and no weights, transformers gets a file of zeros
with the names, shapes and dtype that follow from the config (harness/zeros). Nothing is downloaded for it. An
id of which nothing is here and that cannot be fetched gets the config in recipes/models, if there is one, and
a tokenizer of bytes. Each is said once. A transformers without the functions that are replaced here, as 4.37,
is left as it is.
"""

import os
import sys
from pathlib import Path

CONFIG = "config.json"
_said = set()
"""Topics of the sentences that were printed."""


def begin_to_load(modeling_utils):
    """Replace what finds the files of weights in transformers' modeling_utils: zeros where there are none."""
    original = getattr(modeling_utils, "_get_resolved_checkpoint_files", None)
    if original is None:
        return

    def resolved(pretrained_model_name_or_path, *args, **kwargs):
        if pretrained_model_name_or_path is None or kwargs.get("gguf_file"):
            return original(pretrained_model_name_or_path, *args, **kwargs)
        local = {**(kwargs.get("download_kwargs") or {}), "local_files_only": True}
        try:
            return original(pretrained_model_name_or_path, *args, **{**kwargs, "download_kwargs": local})
        except OSError:
            config = _config_of(str(pretrained_model_name_or_path), local)
            zeros = None if config is None else _zeros(str(pretrained_model_name_or_path), config)
        if zeros is not None:
            whatever_is_asked = {"variant": None, "use_safetensors": True, "download_kwargs": {}}
            return original(zeros, *args, **{**kwargs, **whatever_is_asked})
        return original(pretrained_model_name_or_path, *args, **kwargs)

    modeling_utils._get_resolved_checkpoint_files = resolved


def begin_to_fetch(hub):
    """Replace what fetches files in transformers' utils.hub: a model of recipes/models has stand-ins."""
    original = getattr(hub, "cached_files", None)
    if original is None:
        return

    def cached_files(path_or_repo_id, filenames, *args, **kwargs):
        if not os.path.isdir(path_or_repo_id):
            _stop_asking_an_unreachable_hub()
        failure = None
        try:
            found = original(path_or_repo_id, filenames, *args, **kwargs)
        except OSError as error:
            found, failure = None, error
        if not found:
            folder = _unfetched(str(path_or_repo_id))
            stand_ins = [] if folder is None else [folder / name for name in filenames]
            found = [str(path) for path in stand_ins if path.exists()] or found
        if failure is not None and not found:
            if CONFIG in filenames and not os.path.isdir(path_or_repo_id):
                _say(
                    f"{path_or_repo_id} unknown",
                    f"{path_or_repo_id} is not here. `harness checkpoint CONFIG --out DIR` makes a folder of "
                    "zeros of any model's config.json: give the program that.",
                )
            raise failure
        return found

    hub.cached_files = cached_files


def _config_of(model, download):
    """The path of the config.json of `model`: a folder, an id in the cache, or one with stand-ins.

    `download`: transformers' options of a download.
    """
    from transformers.utils.hub import cached_file

    options = {name: download[name] for name in ("cache_dir", "revision", "subfolder") if name in download}
    try:
        found = cached_file(model, CONFIG, local_files_only=True, **options)
    except OSError:
        return None
    return None if found is None else Path(found)


def _zeros(model, config):
    """The folder of zeros for the config at the path `config`; None, and a sentence, without one."""
    zeros = _harness()
    if zeros is None:
        return None
    try:
        folder = zeros.stand_in_folder(config)
    except zeros.InputError as error:
        _say(model, f"the weights of {model} are not here, and zeros cannot take their place: {error}")
        return None
    _say(
        model, f"the weights of {model} are not here: zeros take their place. Memory does not depend on them."
    )
    return str(folder)


def _unfetched(model):
    """The folder of stand-ins for an id of which nothing is in the cache; None for any other `model`, and
    where recipes/models has none like it."""
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


def _stop_asking_an_unreachable_hub():
    """Look once whether the Hub can be reached, and else use its cache alone: its libraries would try half a
    minute for each file."""
    if "hub" in _said:
        return
    _said.add("hub")
    zeros = _harness()
    unreached = "" if zeros is None else zeros.hub_unreached()
    if unreached:
        zeros.hub_left_alone()
        _say("no hub", f"{unreached}. What is in its cache is used.")


def _harness():
    """The package harness.zeros; None where this interpreter cannot import it."""
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


def _say(topic, sentence):
    """Print `sentence` on rank 0, unless there was one about this topic before."""
    if topic not in _said and os.environ.get("RANK", "0") == "0":
        print(f"virtual GPU: {sentence}", file=sys.stderr)
    _said.add(topic)
