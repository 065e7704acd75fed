"""[security]: who may connect."""

from pathlib import Path

from tba.common.config.section import Section


class SecuritySection(Section):
    """Keys that encrypt and authenticate the connections between machines ([security](security.md))."""

    keys: Path | None = None
    """Directory of this node's key pair and of the keys that it admits (`tba keys`). With it every TCP socket is
    encrypted, and only authorised keys get in. Without it TCP sockets are open to every program that reaches them."""
    insecure: bool = False
    """Whether servers may listen at addresses that other machines can reach without keys."""
