"""The checks of `tba doctor` for who may connect and who may read."""

from tba.common import run_files
from tba.common.config import Config
from tba.common.errors import ConfigError, quantity
from tba.common.wire.curve import check_curve
from tba.common.wire.keys import AUTHORIZED, buffer_key, own_pair, read_authorized, server_keys
from tba.common.wire.socket_files import is_private

Result = tuple[str, str]


def check_keys(config: Config) -> Result:
    """Check the key files of this node, and that no address is open to other machines without keys."""
    addresses = {
        "buffer.address": config.address,
        "train.serve_snapshots": config.train.serve_snapshots,
        "search.serve_snapshots": config.search.serve_snapshots,
    }
    named = {setting: address for setting, address in addresses.items() if address}
    try:
        if config.security.keys is None:
            return _without_keys(config, named)
        check_curve()
        own, buffer = own_pair(config.security.keys), buffer_key(config.security.keys)
    except ConfigError as error:
        return "fail", str(error)
    admitted = read_authorized(config.security.keys / AUTHORIZED)
    files = len(list((config.security.keys / AUTHORIZED).glob("*.pub")))
    if len(admitted) < files:
        return "warn", f"{quantity(files - len(admitted), 'key')} in {config.security.keys / AUTHORIZED} cannot be used"
    if own.public == buffer and not admitted:
        return "warn", f"the buffer of {own.name} admits no key: `tba keys authorize`"
    return "ok", f"{own.name}; its servers admit {quantity(len(admitted), 'key')}"


def _without_keys(config: Config, addresses: dict[str, str]) -> Result:
    for setting, address in addresses.items():
        server_keys(config.security.keys, address, setting, insecure=config.security.insecure)
    remote = [setting for setting, address in addresses.items() if not is_private(address)]
    if remote:
        return "warn", f"security.insecure: every program that reaches {', '.join(remote)} may read and change the run"
    open_here = [setting for setting, address in addresses.items() if address.startswith("tcp://")]
    if open_here:
        return "warn", f'every user of this machine may connect to {", ".join(open_here)}: use buffer.address = "auto"'
    return "ok", "none: the sockets are files of this user"


def check_modes(config: Config) -> Result:
    """Check that other users cannot read what the run has written."""
    # A directory of an earlier release may be open, and one that is made by hand.
    if config.run.dir.exists() and config.run.dir.stat().st_mode & 0o077:
        found = [config.run.dir / run_files.LOGS, config.snapshots, config.checkpoints, config.spool, config.database]
        for path in found:
            if path.exists() and path.stat().st_mode & 0o077:
                return "warn", f"other users may read {path}: chmod -R go= {config.run.dir}"
    return "ok", f"only this user may read what is in {config.run.dir}"
