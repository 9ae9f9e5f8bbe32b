"""A recipe that names no attention has the one that its model has."""

import json
from pathlib import Path

import pytest

from harness.architecture import with_attention
from harness.architecture.attention import has_sdpa
from harness.recipe import Recipe, changed_recipe, check_recipe


def _recipe(folder: Path, config: dict[str, object], **fields: object) -> Recipe:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return check_recipe({"model": str(path), **fields}, "test")


def test_every_type_has_what_its_class_in_transformers_says() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    known = 0
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if (found := has_sdpa(family)) is not None:
            made_by = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
            assert found == made_by._supports_sdpa, family
            known += 1
    assert known > 0.9 * len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_model_without_sdpa_is_given_eager_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = _recipe(tmp_path, {"model_type": "xglm"})
    assert with_attention(recipe).attention == "eager"
    assert with_attention(recipe).attention == "eager"
    assert capsys.readouterr().err.count("xglm has no sdpa") == 1


def test_capped_scores_are_eager(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, {"model_type": "llama", "attn_logit_softcapping": 50.0})
    assert with_attention(recipe).attention == "eager"


def test_what_a_recipe_names_stays(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, {"model_type": "xglm"}, attention="sdpa")
    assert with_attention(recipe) is recipe
    assert with_attention(changed_recipe(recipe, {"seq_len": 4})).attention == "sdpa"


def test_a_changed_recipe_still_leaves_it_to_the_model(tmp_path: Path) -> None:
    recipe = changed_recipe(_recipe(tmp_path, {"model_type": "xglm"}), {"seq_len": 4})
    assert with_attention(recipe).attention == "eager"


def test_a_model_that_is_nowhere_is_for_others_to_refuse(tmp_path: Path) -> None:
    recipe = check_recipe({"model": str(tmp_path / "none.json")}, "test")
    assert with_attention(recipe) is recipe
