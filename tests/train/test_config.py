"""A key of another kind's training is refused; what a kind reads may be changed."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.train import KINDS, TrainConfig, require_read
from tests.test_recipes import RECIPES, load, name

OTHER: dict[str, Any] = {
    "feature_weight": 2.0,
    "classification_weight": 0.5,
    "feature_noise": 0.0,
    "noise_length_scaling": True,
    "unroll_steps": 3,
    "unroll_decay": 0.5,
    "divisor": "per_step",
    "mask_outside_vocabulary": False,
    "label_weight": 0.5,
    "law_weight": 1.0,
    "head_decay": 0.5,
    "dropout": 0.1,
    "distill": "kl",
    "distill_weight": 2.0,
    "token_weight": 0.5,
    "on_policy": 0.5,
    "on_policy_tokens": 9,
    "loss": "kl",
}


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa", "hydra", "draft_lm"])
def test_a_key_is_taken_by_its_own_kinds_and_refused_by_the_others(kind: str, key: str) -> None:
    needed: dict[str, Any] = {"distill": "kl"} if kind == "draft_lm" and key != "distill" else {}
    if key == "on_policy_tokens" and kind == "draft_lm":
        needed["on_policy"] = 0.5
    if key == "loss" and kind in ("medusa", "hydra"):
        needed = {"law_weight": 1.0}
    changed = replace(TrainConfig(), **needed, **{key: OTHER[key]})
    if kind in KINDS[key]:
        require_read(changed, kind)
        return
    with pytest.raises(UserError, match=f"^train.{key}: belongs to .*, this head is {kind}; leave it out"):
        require_read(changed, kind)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("medusa", {"loss": "kl"}, "train.loss: does nothing without train.law_weight, which is 0; set that"),
        ("draft_lm", {"token_weight": 0.5}, "train.token_weight: does nothing without train.distill"),
        ("draft_lm", {"on_policy": 0.5}, "train.on_policy: does nothing without train.distill"),
        ("eagle3", {"jsd_beta": 0.2}, "train.jsd_beta: does nothing without jsd, and train.loss is soft_cross_entropy"),
        ("eagle3", {"lk_eta": 1.0}, "train.lk_eta: does nothing without lk_hybrid"),
    ],
)
def test_a_key_that_another_switches_off_is_refused_with_the_way_to_switch_it_on(
    kind: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        require_read(replace(TrainConfig(), **keys), kind)
    on: dict[str, Any] = {
        "medusa": {"law_weight": 0.5}, "draft_lm": {"distill": "kl"},
        "eagle3": {"loss": "jsd" if "jsd_beta" in keys else "lk_hybrid"},
    }[kind]  # fmt: skip
    require_read(replace(TrainConfig(), **keys, **on), kind)


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_every_recipe_sets_only_what_its_head_reads(path: Any) -> None:
    recipe = load(path)
    require_read(recipe.train, recipe.head.kind)
