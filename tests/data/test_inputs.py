"""Laws of what a stage counts as its inputs."""

from pathlib import Path
from typing import Any

from aerie.configs.schema.data import DataConfig, FeaturesConfig, StateServersConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.inputs import feature_stage, state_inputs
from tests import tiny


def test_what_decides_the_states(tmp_path: Path) -> None:
    """Weights taps and dtypes decide the states and texts only the rows."""
    target = tiny.target(tmp_path / "target")
    tiny.write_conversations(tmp_path / "rows/one.jsonl", 8)

    def inputs(**features: Any) -> dict[str, Any]:
        data = DataConfig(conversations=(str(tmp_path / "rows"),))
        own = FeaturesConfig(**{"after_blocks": (), **features})
        return feature_stage(
            Recipe("run", TargetConfig(path=str(target)), data, features=own)
        ).inputs

    before = inputs()
    server = StateServersConfig(("http://host:8000",), "/states")
    assert inputs(batch_tokens=64, shuffle_shards=2, server=server) == before
    for change in ({"after_blocks": (1,)}, {"storage": "int8"}):
        assert state_inputs(inputs(**change)) != state_inputs(before)
    for path in (
        target / "chat_template.jinja",
        tmp_path / "rows/one.jsonl",
        tmp_path / "rows/two.jsonl",
    ):
        earlier = inputs()
        path.write_text((path.read_text() if path.exists() else "") + " ")
        assert inputs() != earlier and state_inputs(inputs()) == state_inputs(before)
    tiny.flip(target / "model.safetensors")
    assert state_inputs(inputs()) != state_inputs(before)
