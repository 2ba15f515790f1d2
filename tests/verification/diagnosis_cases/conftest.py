"""The generator of cases knows nothing of the package, which makes the files of the embedded model."""

import pytest

from ...embedded import default_bundle, unpacked
from ...outlier_checkpoints import outlier_checkpoint
from ...shared_exports import run_folder
from .worlds import provide


@pytest.fixture(scope="session", autouse=True)
def _embedded_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = unpacked(tmp_path_factory.mktemp("embedded"))
    provide(bundle=default_bundle(), embedded=folder)


@pytest.fixture(scope="session")
def outlier_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A checkpoint with massive activations, as OpenAI's encoders have them."""
    provide(outlier=outlier_checkpoint("early-tail", run_folder(tmp_path_factory)))
