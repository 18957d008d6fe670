"""Passes that installed packages contribute, by the entry-point group ``ep_fx.passes``.

    [project.entry-points."ep_fx.passes"]
    my-pass = "my_package.my_pass:MyPass"          # a subclass of ep_fx.graph.Pass whose `name` is "my-pass"
"""

from __future__ import annotations

from collections.abc import Container
from importlib.metadata import entry_points

from ep_fx.graph import Pass

GROUP = "ep_fx.passes"


def outside_passes(taken: Container[str]) -> dict[str, type[Pass]]:
    """The contributed passes by name, in order of name.

    Args:
        taken: names that are not to be had.

    Raises:
        ValueError: a contribution that is no pass, is called otherwise than its entry point, or has a taken name.
    """
    found: dict[str, type[Pass]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        cls = point.load()
        source = f"entry point {point.name!r} = {point.value!r} of group {GROUP!r}"
        if not isinstance(cls, type) or not issubclass(cls, Pass):
            raise ValueError(f"{source}: expected a subclass of ep_fx.graph.Pass, got {cls!r}")
        if cls.name != point.name:
            raise ValueError(f"{source}: the pass calls itself {cls.name!r}; give the entry point that name")
        if point.name in found or point.name in taken:
            raise ValueError(f"{source}: there is another pass of this name")
        found[point.name] = cls
    return found
