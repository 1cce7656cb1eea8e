"""The target that the tests of the feature cache share."""

import pytest

from aerie.configs.schema.heads import TargetConfig
from aerie.model.target import Target
from tests import tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(
        TargetConfig(path=str(tiny.target(tmp_path_factory.mktemp("target") / "target")))
    )
