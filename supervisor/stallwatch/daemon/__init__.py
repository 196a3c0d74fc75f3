"""The thin shell that ties the pure parts to the machine."""

from stallwatch.daemon.main import run

__all__ = ["run"]
