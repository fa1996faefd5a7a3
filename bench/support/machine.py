"""Where and when a row was measured."""

from shardlite.apps.footprint.machine import machine

__all__ = ["machine"]
