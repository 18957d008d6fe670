"""Running a transformed model: EPModule, its programs, the differential check."""
from ep_fx.runtime.module import EPModule
from ep_fx.runtime.program import Program

__all__ = ["EPModule", "Program"]
