from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["copied", "mapped"])
def shares_memory(request: pytest.FixtureRequest) -> bool:
    """Whether ranks hold copies of full parameters, or read one array that all of them map."""
    found: bool = request.param
    return found
