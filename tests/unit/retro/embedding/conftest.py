"""The encoder of the tests in this folder."""

import pytest
from small_encoders import write_encoder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder") / "hf")
