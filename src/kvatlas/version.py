"""The version, for modules that must not reach for the whole package."""

__version__ = "0.1.0"
