"""Who may send what: the roles of each message, and the owner of each sender name.

A sender name belongs to the client that used it first, for as long as that client is at work: no other client
puts, leases or says goodbye in its name.
"""

from typing import get_args

from tba.buffer.service.clients import Clients
from tba.common.errors import Refused
from tba.common.log import get_logger
from tba.common.wire import messages
from tba.common.wire.channels import Peer
from tba.common.wire.codec import RequestHeader
from tba.common.wire.fields import Role
from tba.common.wire.keys import AuthorizedKeys, key_role_for
from tba.common.wire.messages import Archive, GetStatus, PutEvaluation

log = get_logger(__name__)

_EVERY_ROLE: tuple[Role, ...] = get_args(Role)
MAY_SEND: dict[str, tuple[Role, ...]] = {
    messages.Hello.TYPE: _EVERY_ROLE,
    messages.Heartbeat.TYPE: _EVERY_ROLE,
    messages.Goodbye.TYPE: _EVERY_ROLE,
    GetStatus.TYPE: _EVERY_ROLE,
    messages.RegisterPrompts.TYPE: ("searcher",),
    messages.LeasePrompts.TYPE: ("searcher",),
    messages.PutTrajectories.TYPE: ("searcher", "importer"),
    Archive.TYPE: ("importer",),
    PutEvaluation.TYPE: ("evaluator",),
    messages.SampleBatch.TYPE: ("trainer",),
    messages.ReportStep.TYPE: ("trainer",),
    messages.FinishRun.TYPE: ("trainer",),
    messages.AnnounceSnapshot.TYPE: ("publisher",),
}


class Admission:
    """Admits a request, or refuses it and logs who sent it."""

    def __init__(self, clients: Clients, keys: AuthorizedKeys | None) -> None:
        self._clients = clients
        self._keys = keys

    def check(self, peer: Peer, header: RequestHeader) -> None:
        """Raise Refused if this connection may not send this message, or not in the name of this sender."""
        try:
            allowed = MAY_SEND[header.type]
            if header.role not in allowed:
                roles = " or ".join(allowed)
                raise Refused("not_allowed", f"{header.type} is refused from a {header.role}: {roles} only")
            self._check_key(peer, header)
            self._check_owner(peer, header)
            self._check_trainer(header)
        except Refused as refusal:
            log.warning(
                "request refused",
                by=self._name(peer),
                # A line break in a name must not forge a line of the log.
                sender=header.sender.encode("unicode_escape").decode(),
                role=header.role,
                message=header.type,
                reason=str(refusal).encode("unicode_escape").decode(),
            )
            raise

    def _check_key(self, peer: Peer, header: RequestHeader) -> None:
        """Refuse a key that was revoked, on the connections that it has opened before, or that has other roles.

        Its client waits: both are repaired in a file of this node.
        """
        if self._keys is None:
            return
        known = self._keys.find(peer.key)
        if known is None:
            raise Refused(
                "not_authorised",
                "the key of this node is not authorised any more: run on the node of the buffer "
                f"`tba keys authorize NAME {peer.key} --role ROLE`",
            )
        if not known.speaks_as(header.role):
            roles, missing = ", ".join(known.roles), key_role_for(header.role)
            flags = " ".join(f"--role {role}" for role in (*known.roles, missing))
            raise Refused(
                "not_authorised",
                f"{header.type} is refused: the key of {known.name} is for {roles} only, not for {missing}: run on the "
                f"node of the buffer `tba keys authorize {known.name} {peer.key} {flags}`",
            )

    def _name(self, peer: Peer) -> str:
        known = self._keys.find(peer.key) if self._keys else None
        return f"{known.name} at {peer.address}" if known else f"{peer.key} {peer.address}".strip()

    def _check_owner(self, peer: Peer, header: RequestHeader) -> None:
        """An importer may go on where another one stopped: its sender is named after the file."""
        # With keys a name is not free when its client falls silent: it may be cut off.
        client = self._clients.at_work(header.sender) if self._keys is None else self._clients.get(header.sender)
        # A monitor holds nothing: it must not reserve the names that others come back with after a restart.
        if client is None or (client.role == "monitor" and header.role != "monitor"):
            return
        if client.owner != owner_of(peer, header) or _family(client.role) != _family(header.role):
            raise Refused(
                "other_sender",
                f"{header.type} is refused: the sender {header.sender} is another client, a {client.role} that is at "
                "work; choose a name that is new at each start",
            )

    def _check_trainer(self, header: RequestHeader) -> None:
        """Only the trainer that said hello to this run works on it, while it does."""
        if MAY_SEND[header.type] == _EVERY_ROLE or _family(header.role) != "trainer":
            return
        if (other := self._clients.other_trainer(header.sender)) is not None:
            raise Refused("trainer_exists", f"{header.type} is refused: a trainer on {other.host} works on this run")


def owner_of(peer: Peer, header: RequestHeader) -> bytes:
    """Return what another connection must have to use the same sender name."""
    return b"" if header.role == "importer" else peer.owner


def _family(role: Role) -> Role:
    return "trainer" if role == "publisher" else role
