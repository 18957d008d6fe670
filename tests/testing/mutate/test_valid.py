"""No rule complains about any valid graph; `make mutate` tries 200 of them."""
from __future__ import annotations

import pytest

from tests.testing.mutate.valid import alarms


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_false_alarm() -> None:
    checked, wrong = alarms(80)
    assert checked == 80
    assert wrong == []
