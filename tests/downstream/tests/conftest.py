from __future__ import annotations

import pytest
from my_project.model import Model, tokens

import ep_fx
from ep_fx.testing import fake_mesh


@pytest.fixture(scope="session")
def module() -> ep_fx.EPModule:
    """The model on a mesh of 4 ranks that are none: to be read, not to be run."""
    with fake_mesh(fsdp=2, ep=2) as mesh:
        return ep_fx.transform(Model(), mesh, example_inputs=(tokens(),))
