"""The one TOML file, and the same keys as flags. Everything wrong is a ConfigError with a place."""

from stallwatch.config.gateway import GatewayConfig
from stallwatch.config.load import GATEWAY, from_command, load
from stallwatch.config.model import Config, EngineConfig, RestartConfig, SupervisorConfig

__all__ = [
    "GATEWAY",
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "RestartConfig",
    "SupervisorConfig",
    "from_command",
    "load",
]
