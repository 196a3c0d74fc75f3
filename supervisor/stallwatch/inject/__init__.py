"""Our plugin inside an engine of another environment, by PYTHONPATH and nothing else."""

from stallwatch.inject.needed import needed
from stallwatch.inject.site import InjectionImpossible, prepare

__all__ = ["InjectionImpossible", "needed", "prepare"]
