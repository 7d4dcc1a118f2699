"""1 images. Simulated sites: labeled source images as other scanners, stains and protocols would show them."""

from dltta.data.shifts.draw import HARMFUL, SOURCE_SITE, draw_sites
from dltta.data.shifts.site import SimulatedSite
from dltta.data.shifts.stream import SimulatedStream

__all__ = ["HARMFUL", "SOURCE_SITE", "SimulatedSite", "SimulatedStream", "draw_sites"]
