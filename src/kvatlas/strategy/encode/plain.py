"""Keys and values as they are: the default, with a name for presets that encode otherwise (``flexgen+raw``)."""

from kvatlas.strategy.answers import Encode
from kvatlas.strategy.registry import Preset, register

register(Preset("raw", {"encode": Encode}, "keys and values as they are: takes the place of a preset's own encoder"))
