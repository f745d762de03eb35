from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["copied", "mapped"])
def shares_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ranks hold copies of full parameters, or read one array that all of them map.

    Then gradients of any size stay where autograd put them, as large ones do.
    """
    found: bool = request.param
    if found:
        monkeypatch.setattr("shard_fsdp._grad_buffer._KEPT_BYTES", 0)
    return found
