"""The command line ``ep-fx``: transform, explain, verify, view, diff, bench and doctor.

Nothing runs and no device is needed: a model is captured from the meta device, on a mesh of any size in one process.
One file a command; what they do lies in the library.
"""

from ep_fx.cli.app import app, main

__all__ = ["app", "main"]
