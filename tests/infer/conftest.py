"""The miniature on which several tests prove or time methods."""

import pytest

from aerie.infer.measure.lossless import SampledProver


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> SampledProver:
    return SampledProver(tmp_path_factory.mktemp("miniature"))
