"""Negative tests as a table: each entry edits a valid step, and one named rule must notice."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ep_fx.verify import Report, VerificationError, verify
from tests.verify.builder import Step

Edit = Callable[[Step], None]


@dataclass(frozen=True)
class Case:
    """One way to break one rule.

    Args:
        rule: id of the rule that must notice.
        edit: changes the graph of a step.
        options: of the step.
    """

    rule: str
    edit: Edit
    options: dict[str, Any]

    def run(self) -> Report:
        """The report on the edited graph, after the rule did notice and said where."""
        step = Step(**self.options)
        assert verify(step.graph).ok
        self.edit(step)
        report = verify(step.graph)
        assert self.rule in report.broken, f"rule {self.rule} sees nothing; broken: {report.broken}"
        text = str(VerificationError(report))
        assert f"rule {self.rule}: {report.of(self.rule).rule.sentence}" in text
        assert "  remedy " in text
        return report


@dataclass
class Breaks:
    """The cases of one rule; calling it with a step's options gives the decorator that enters an edit."""

    rule: str
    cases: list[Case] = field(default_factory=list)

    def __call__(self, **options: Any) -> Callable[[Edit], Edit]:
        def enter(edit: Edit) -> Edit:
            self.cases.append(Case(self.rule, edit, options))
            return edit

        return enter


def name_of(case: Case) -> str:
    """Id of the test of one case."""
    options = "-".join(f"{k}={v}" for k, v in case.options.items())
    return f"{case.rule}:{case.edit.__name__}" + (f"[{options}]" if options else "")


def replace_argument(node: fx.Node, position: int, value: Any) -> None:
    """Sets one argument."""
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


def erase(node: fx.Node, instead: fx.Node | None = None) -> None:
    """Removes a node; its users read `instead`."""
    if instead is not None:
        node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def set_gradient(step: Step, name: str, value: Any) -> None:
    """Returns `value` as the gradient of the parameter `name`."""
    step.graph.set_gradients({name: value})
