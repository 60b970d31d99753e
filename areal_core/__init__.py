"""The training core of areal-debug: reinforcement learning on FSDP2 and SGLang."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_core.remote import RemoteEngine

__all__ = ["RemoteEngine"]


def __getattr__(name: str) -> Any:
    """Import `RemoteEngine` when it is used: it needs torch, which light tools must not load."""
    if name == "RemoteEngine":
        from areal_core.remote import RemoteEngine

        return RemoteEngine
    raise AttributeError(f"module 'areal_core' has no attribute {name!r}")
