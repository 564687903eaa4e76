"""Recipes of other tools -> our YAML. Reads text and tables, and imports none of these tools."""

from framework.converters.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
