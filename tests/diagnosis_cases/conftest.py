"""The generator of cases knows nothing of the package, which makes the files of the embedded model."""

import pytest

from ..embedded import default_bundle, unpacked
from .worlds import provide


@pytest.fixture(scope="session", autouse=True)
def _embedded_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    provide(default_bundle(), unpacked(tmp_path_factory.mktemp("embedded")))
