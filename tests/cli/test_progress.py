"""A bar appears on a terminal for work of more than two seconds, and never in a pipe."""

from __future__ import annotations

import time

import pytest
from torch import nn

from ep_fx.cli import output
from ep_fx.cli.output import Stages


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(output, "_PATIENCE", 0.05)


@pytest.mark.usefixtures("terminal")
def test_a_stage_that_takes_long_is_shown_and_one_that_does_not_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages() as stages, stages.stage("quick"):
        pass
    assert "quick" not in capsys.readouterr().err
    with Stages() as stages, stages.stage("slow"):
        time.sleep(0.5)
    assert "slow" in capsys.readouterr().err


@pytest.mark.usefixtures("terminal")
def test_a_capture_counts_the_modules_that_are_through_and_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Stages() as stages, stages.forward_of(model):
        (task,) = stages._bars.tasks
        assert (task.completed, task.total) == (0, 2)
        model[0](model[0].weight)
        assert task.completed == 1
        model(model[0].weight)
        shown = [(task.description, task.total) for task in stages._bars.tasks if task.visible]
        assert shown == [("capture backward, passes", None)]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pipe_gets_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PATIENCE", 0.0)
    with Stages() as stages, stages.stage("slow"):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
