"""Every recipe in configs/ loads; the keys of a recipe, and the page that lists them."""

import argparse
from dataclasses import fields
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from pydantic import TypeAdapter, ValidationError

from aerie.configs import keys
from aerie.configs.read import ALIASES, sections, suggestion
from aerie.configs.schema import recipe as pipeline
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
TOPOLOGIES = sorted((CONFIGS / "accelerate").glob("*.yaml"))
TREES = sorted((CONFIGS / "trees").glob("*.yaml"))
RECIPES = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if path not in [*TOPOLOGIES, *TREES, CONFIGS / "schema/aliases.yaml"]
)


def load(path: Path, *overrides: str) -> pipeline.Recipe:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return pipeline.load(*parser.parse_known_args(["--config", str(path), *overrides]))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_loads_keeps_its_run_under_runs_and_drafts_within_its_positions(
    path: Path,
) -> None:
    recipe = load(path)
    template = recipe.target.chat_template
    assert recipe.run.startswith("runs/") and recipe.tree is not None
    assert template is None or (ROOT / template).is_file()
    positions = recipe.head.max_position_embeddings
    if positions and recipe.output is None:  # with `output` it trains a target: no drafts
        assert positions >= recipe.data.max_length + recipe.tree.levels


def test_another_kind_of_head_or_method_forgets_the_files_trees() -> None:
    path = CONFIGS / "embedded.yaml"
    eagle1 = load(path)
    eagle3 = load(path, "--head.kind", "eagle3")
    chain = load(path, "--calibrate.method", "eagle-chain")
    changed: Any = load(path, "--head.kind=eagle3", "--tree.levels=3").tree
    assert eagle1.calibrate and eagle1.tree == load(path, "--head.kind", "eagle1").tree
    assert eagle3.tree == load(path, "--head.kind=eagle3", "--tree={}").tree != eagle1.tree
    assert chain.calibrate and chain.calibrate.tree and chain.calibrate.tree.shape == "chain"
    assert chain.tree == eagle1.tree and (changed.levels, changed.nodes) == (3, 60)


def test_words_for_lists_short_dtypes_and_the_home_directory_are_read_as_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text(
        "run: ~/run\ntarget: {path: ~/target, dtype: bf16}\ndata: {conversations: ~/rows.jsonl}\n"
        "train: {trackers: wandb}\n"
        "bench: {rows: {method: vanilla, head: ~/head}, prompts: {tasks: gsm8k}}\n"
    )
    recipe = load(
        Path("~/recipe.yaml"), "--features.after_blocks", "2", "--features.dtype", "torch.half"
    )
    assert (recipe.run, recipe.target.path) == (f"{tmp_path}/run", f"{tmp_path}/target")
    assert recipe.data.conversations == (f"{tmp_path}/rows.jsonl",)
    assert (recipe.target.dtype, recipe.features.dtype) == ("bfloat16", "float16")
    assert (recipe.features.after_blocks, recipe.train.trackers) == ((2,), ("wandb",))
    assert recipe.bench is not None and recipe.bench.rows[0].head == f"{tmp_path}/head"
    assert recipe.bench.prompts.tasks[0].name == "gsm8k"


def test_no_number_of_a_recipe_is_negative() -> None:
    """But one of a sweep's values."""
    keys = chain.from_iterable(fields(section) for section, _, _ in sections(pipeline.Recipe))
    for key, value in product({*keys}, (-2, [-2], [-2, -2])):
        if key.name != "values":
            with pytest.raises(ValidationError):
                TypeAdapter(key.type).validate_python(value)
                pytest.fail(f"{key.name} takes {value}")


OUTSIDE = """train.max_steps=0 data.limit=0 threads=0 seed=1e400 train.betas=[1,0.9]
train.weight_decay=.inf train.max_seconds=.nan head.rope_theta=.inf train.feature_noise=.nan
calibrate.temperature=.inf distill.server.timeout_s=.inf run= data.conversations=['']"""


@pytest.mark.parametrize("word", OUTSIDE.split())
def test_a_number_that_means_nothing_and_a_path_of_nothing_are_refused(word: str) -> None:
    distill = ("--distill.server.urls", "http://a", "--distill.sources", "[{path: a}]")
    tiny.refused(
        rf"^--{word.split('=')[0]}.*\Z", load, CONFIGS / "embedded.yaml", *distill, f"--{word}"
    )


CONTRADICTIONS = """
embedded train.feature_weight=0 train.classification_weight=0 => nothing would be learnt
embedded features.mode=online features.storage=fp8 => are a cache's
embedded tree.stop.rule=vote tree.stop.signals=expectation tree.stop.bonus=0 => set bonus above 0
hydra/embedded head.prefix_layer=false head.head_dim=8 => head_dim is the prefix layer's
draft_lm/embedded train.distill=null train.distill_weight=2 => weigh nothing without distill
"""


@pytest.mark.parametrize("line", CONTRADICTIONS.strip().splitlines())
def test_keys_that_mean_nothing_together_are_refused(line: str) -> None:
    words, _, message = line.partition(" => ")
    name, *overrides = words.split()
    said = rf"^--{overrides[-1].split('=')[0]}.*{message}"
    tiny.refused(said, load, CONFIGS / f"{name}.yaml", *(f"--{word}" for word in overrides))


def test_names_of_other_programs_lead_to_ours() -> None:
    for other, key in ALIASES.items():
        advice = suggestion([other], pipeline.Recipe)
        assert advice.startswith("did you mean '"), (other, advice)
        assert advice.endswith((f".{key}'?", f"'{key}'?")), (other, advice)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize(("ours", "theirs"), [("embedded", ""), ("vicuna-7b", "eagle1")])
def test_recipes_that_share_a_cache_agree(kind: str, ours: str, theirs: str) -> None:
    """They train on the feature cache of the EAGLE-1 recipe."""
    recipe = load(CONFIGS / kind / f"{ours}.yaml")
    eagle1 = load(CONFIGS / theirs / f"{ours}.yaml")
    assert (recipe.run, recipe.data, recipe.features) == (eagle1.run, eagle1.data, eagle1.features)


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_every_topology_is_one_that_accelerate_reads(path: Path) -> None:
    config = load_config_from_file(str(path))
    deepspeed = yaml.safe_load(path.read_text(encoding="utf-8")).get("deepspeed_config", {})
    assert config.num_processes == (1 if path.stem == "cpu" else 2)
    assert config.use_cpu == (path.stem == "cpu")  # use_cpu would switch DeepSpeed off
    assert {"gradient_clipping", "gradient_accumulation_steps"}.isdisjoint(
        deepspeed
    )  # set by the loop
    if path.stem.startswith("zero"):
        assert deepspeed["zero_stage"] == int(path.stem.removeprefix("zero"))


def test_the_page_of_recipes_is_fresh_and_every_key_has_a_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tiny.call(keys, "--markdown") == 0
    fresh = (ROOT / "docs/recipes.md").read_text(encoding="utf-8") == capsys.readouterr().out
    assert fresh, "renew it: aerie keys --markdown > docs/recipes.md"
    assert [
        key
        for _, _, rows in keys.documented_keys()
        for key, words in rows.items()
        if words.startswith("(")
    ] == []


def test_keys_tells_a_section_a_key_and_their_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
    aerie keys
        - `train`:
    aerie keys train
        (kind: eagle1 | eagle3 | medusa | hydra | block | draft_lm)
        (kind: eagle3)
        - `unroll_steps`:
    aerie keys data.date
        (date | null; default null)
    aerie keys tree.stop
        `tree.stop` (rule: entropy)
    aerie keys tree.stop.rule
        `tree.stop` (rule: entropy)
    aerie keys bench.rows.0.tree.nodes
        `bench.rows.*.tree` (shape: dynamic)
    aerie keys trian
        exit 2
        did you mean 'train'?
    aerie keys tree.depth
        exit 2
        did you mean 'tree.levels'?
    aerie keys lr
        exit 2
        did you mean 'train.learning_rate'?
    """
    tiny.session(text, capsys)
