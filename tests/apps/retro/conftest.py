"""What the tests in this folder share."""

import pytest


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A small BERT in Hugging Face's form."""
    from small_encoders import write_encoder  # transformers takes seconds

    return write_encoder(tmp_path_factory.mktemp("encoder") / "hf")
