"""Every recipe that ships loads, so none can rot."""

import argparse
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from aerie.configs.errors import UserError
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import StaticConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
TOPOLOGIES = sorted((CONFIGS / "accelerate").glob("*.yaml"))
TREES = sorted((CONFIGS / "trees").glob("*.yaml"))
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if path not in [*TOPOLOGIES, *TREES])


def name(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def load(path: Path, *overrides: str) -> pipeline.Recipe:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return pipeline.load(*parser.parse_known_args(["--config", str(path), *overrides]))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_every_recipe_loads_and_keeps_its_run_under_runs(path: Path) -> None:
    recipe = load(path)
    assert recipe.run.startswith("runs/")
    template = recipe.target.chat_template
    assert template is None or (ROOT / template).is_file(), f"{name(path)}: target.chat_template: no such file"


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_misspelt_key_in_any_recipe_is_refused_with_its_line(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(path.read_text(encoding="utf-8").replace("\ndata:", "\ndatum: 1\ndata:"), encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.yaml:\d+: datum: unknown key; did you mean 'data'"):
        load(broken)


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_full_conversation_and_a_drafted_path_fit_the_head(path: Path) -> None:
    recipe = load(path)
    positions = recipe.head.max_position_embeddings
    assert recipe.tree is not None
    levels = recipe.tree.levels
    is_target = recipe.output is not None  # a target of our own: nothing is drafted with it
    assert is_target or positions is None or positions >= recipe.data.max_length + levels


@pytest.mark.parametrize("path", TREES, ids=name)
def test_every_published_tree_is_a_tree(path: Path) -> None:
    choices = StaticConfig(choices=str(path)).paths
    assert len(choices) == {"eagle1": 25, "medusa63": 63}[path.stem]


def test_the_published_recipes_are_all_there() -> None:
    models = {"vicuna-7b", "vicuna-13b", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b"}
    assert models <= {path.stem for path in RECIPES if path.parent.name == "eagle1"}
    models = {"vicuna-13b", "llama31-8b", "llama33-70b", "qwen3-8b", "qwq-32b", "embedded"}
    assert models <= {path.stem for path in RECIPES if path.parent.name == "eagle3"}
    for kind in ("medusa", "hydra"):
        assert {path.stem for path in RECIPES if path.parent.name == kind} == {"embedded", "vicuna-7b", "vicuna-13b"}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize(
    ("recipe", "eagle"),
    [("embedded", "embedded"), ("vicuna-7b", "eagle1/vicuna-7b"), ("vicuna-13b", "eagle1/vicuna-13b")],
)
def test_medusa_and_hydra_recipes_ask_for_the_feature_cache_of_the_eagle1_recipe(
    kind: str, recipe: str, eagle: str
) -> None:
    ours, theirs = load(CONFIGS / kind / f"{recipe}.yaml"), load(CONFIGS / f"{eagle}.yaml")
    assert (ours.run, ours.target, ours.data, ours.features) == (
        theirs.run,
        theirs.target,
        theirs.data,
        theirs.features,
    )
    assert ours.head.kind == kind and pipeline.RunPaths(Path(ours.run)).head(ours).name == kind


@pytest.mark.parametrize("path", TOPOLOGIES, ids=name)
def test_every_topology_is_one_that_accelerate_reads(path: Path) -> None:
    config = load_config_from_file(str(path))
    deepspeed = yaml.safe_load(path.read_text(encoding="utf-8")).get("deepspeed_config", {})
    assert config.num_processes == (1 if path.stem == "cpu" else 2)
    assert config.use_cpu == (path.stem == "cpu")  # use_cpu would switch DeepSpeed off
    assert {"gradient_clipping", "gradient_accumulation_steps"}.isdisjoint(deepspeed)  # the recipe's, set by the loop
    if path.stem.startswith("zero"):
        assert deepspeed["zero_stage"] == int(path.stem.removeprefix("zero"))
