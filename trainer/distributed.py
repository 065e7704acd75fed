"""The processes that train one model together: their commands, and FSDP2's sharding of the model over them.

Only rank 0 talks to the buffer and writes files; the others execute its commands (`tba.trainer.loop`):

    RESUME and a checkpoint's index    take part in loading it, tensor by tensor
    STEP and the batch                 make the same step
    PUBLISH and the kinds of tensors   take part in gathering weights or adapters, tensor by tensor
    SAVE                               take part in gathering weights and optimiser state
    ASK                                say whether this process was told to stop
    END                                return

Commands go over gloo and the CPU, even where gradients and weights go over NCCL. They are msgpack, never pickle.

Weights, gradients and optimiser state are sharded over the ranks, or over those of each node (`Ranks.replicate`, HSDP):
then each node has a whole model, and gradients are added over the nodes. Each decoder layer is gathered when it is
needed; embeddings, last norm and head (the root) are gathered together, around all layers. Rank 0 alone loads the
weights; the others receive each layer when it is sharded. Sharded weights are float32. In bfloat16 runs all of them are
gathered in bfloat16, to which autocast would convert the matrices anyway. Each rank's gradient of a gathered weight is
in bfloat16; it is added over micro-batches and over the ranks in float32.
"""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tba.common.errors import ConfigError, RankLost
from tba.common.log import get_logger
from tba.common.system.process import RENDEZVOUS_VARIABLE, extend_start

log = get_logger(__name__)

# The others wait for rank 0 for as long as it waits for data. A rank that dies closes its sockets, which is noticed
# immediately.
_TIMEOUT = timedelta(days=365)
# A node without power, or behind a cut cable, closes nothing: after so long without an answer it is lost.
_SILENT_SECONDS = 60
_PROBES = 4
_POLL_SECONDS = 0.2
_TELL_SECONDS = 60.0
_PORT = "29500"
# ioctl(2): the IPv4 address of an interface, netdevice(7).
_SIOCGIFADDR = 0x8915
# What `shard` calls on each FSDPModule.
_FSDP_METHODS = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
RESUME, STEP, PUBLISH, SAVE, ASK, END = "resume", "step", "publish", "save", "ask", "end"
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")


class Ranks:
    """One of the processes: `rank` of `size` on `nodes`, each of which has as many.

    `mesh` is the device mesh of FSDP, None for a single process. `replicas` are the whole models.
    """

    def __init__(self, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None, nodes: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.mesh = mesh
        self.nodes, self.replicas = nodes, 1
        self._commands = dist.new_group(backend="gloo", timeout=_TIMEOUT) if size > 1 else None

    def replicate(self) -> None:
        """Shard within each node, and replicate over the nodes. Every rank must call it, before `shard`."""
        assert self.mesh is not None
        self.replicas = self.nodes
        shape = (self.nodes, self.size // self.nodes)
        self.mesh = init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))
        _notice_silence()

    def send(self, command: str, payload: bytes = b"") -> None:
        """Send a command to all other ranks. Called on rank 0; does nothing for a single process."""
        if self.size == 1:
            return
        data = torch.frombuffer(bytearray(msgpack.packb([command, payload])), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self._commands)
        dist.broadcast(data, src=0, group=self._commands)

    def receive(self) -> tuple[str, bytes]:
        """Wait for the next command of rank 0. Returns its name and payload."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._commands)
        data = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._commands)
        command, payload = msgpack.unpackb(data.numpy().tobytes())
        return command, payload

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks, on the value's device. Every rank must call it."""
        if self.size == 1:
            return value
        total = value.detach().cpu().clone()
        dist.all_reduce(total, group=self._commands)
        return total.to(value.device)

    def least(self, value: int) -> int:
        least = torch.tensor(value)
        if self.size > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self._commands)
        return int(least)

    def any(self, flag: bool) -> bool:
        """Whether a flag is true on any rank. Every rank must call it."""
        return not self.least(int(not flag))

    def agree(self, text: str) -> bool:
        """Whether all ranks have the same text."""
        number = int(xxhash.xxh32_hexdigest(text.encode()), 16)
        return self.least(number) == -self.least(-number)

    def from_rank_0(self, value: Tensor, like: Tensor | None = None) -> Tensor:
        """Return rank 0's value on every rank: sharded as `like` is, else whole. On the others it may be meta."""
        if isinstance(like, DTensor):
            device = like.device_mesh.device_type
            whole = torch.empty_like(value, device=device) if value.is_meta else value.to(device)
            return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=0)
        if self.size > 1:
            # A clone, since a tensor of a file keeps all of the file mapped.
            value = torch.empty_like(value, device="cpu") if value.is_meta else value.clone()
            dist.broadcast(value.view(-1).view(torch.uint8), src=0, group=self._commands)
        return value

    def close(self) -> None:
        """Leave the group. A rank that fails need not call it: the others notice when it ends."""
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Ranks()


def join(device: torch.device, stop: Callable[[], bool] = lambda: False) -> Ranks:
    """Join the ranks that `tba train` or `torchrun` has started; ALONE if there is only this process.

    Both set RANK and WORLD_SIZE, and LOCAL_WORLD_SIZE where there are several nodes. The rendezvous is a file, or
    MASTER_ADDR. If `stop()` comes before all ranks do, the process exits. Raises ConfigError for variables that do not
    fit those of the other ranks, or if this torch is too old to train in several processes.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    if missing := [name for name in _FSDP_METHODS if not hasattr(FSDPModule, name)]:
        raise ConfigError(
            f"several processes train together with torch 2.9 or newer, and torch {torch.__version__} is installed "
            f"(its FSDPModule has no {missing[0]}): install a newer one, or train in one process"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size % local:
        raise ConfigError(f"WORLD_SIZE = {size} is no multiple of LOCAL_WORLD_SIZE = {local}: nodes have equally many")
    file, address = os.environ.get(RENDEZVOUS_VARIABLE), os.environ.get("MASTER_ADDR", "127.0.0.1")
    # torchrun has a store of its own, and has started all ranks.
    meets = not file and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _meet(address, rank, size, stop) if meets else None
    if not file:
        _choose_interface(address)
    place = None if meets else f"file://{file}" if file else "env://"
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, place, store=store, rank=rank, world_size=size)
    ranks = Ranks(rank, size, init_device_mesh(device.type, (size,)), size // local)
    _notice_silence()
    return ranks


def _meet(host: str, rank: int, size: int, stop: Callable[[], bool]) -> TCPStore:
    """Wait for all ranks at MASTER_PORT of a host. Returns the store, which rank 0 serves at this address alone."""
    port = int(os.environ.get("MASTER_PORT", _PORT))
    log.info("waiting for all processes of this trainer", address=f"{host}:{port}", rank=rank, processes=size)
    # Without this socket, torch would listen on all interfaces.
    listener = _listen(host, port) if rank == 0 else None
    told_at = time.monotonic()

    def wait(reason: str) -> None:
        """Wait a moment, and say every minute why. Nothing is lost if the process ends now."""
        nonlocal told_at
        if stop():
            raise SystemExit(0)
        if time.monotonic() - told_at > _TELL_SECONDS:
            told_at = time.monotonic()
            log.warning("waiting for the other nodes of this trainer", address=f"{host}:{port}", reason=reason)
            extend_start()
        time.sleep(_POLL_SECONDS)

    while listener is None:
        try:
            socket.create_connection((host, port), timeout=_SILENT_SECONDS).close()
            break
        except socket.gaierror as error:
            raise ConfigError(f"MASTER_ADDR = {host} is not known here ({error.strerror}): name node 0") from error
        except OSError as error:
            wait(f"node 0 does not answer ({error.strerror or error})")
    store = TCPStore(host, port, size, rank == 0, _TIMEOUT, False, master_listen_fd=listener)
    if rank == 0:
        store.set("size", str(size))
    while not store.check(["size"]):
        wait("rank 0 is not ready")
    if (first := store.get("size").decode()) != str(size):
        raise ConfigError(f"{first} processes train at {host}:{port}, here {size}: give all nodes the same number")
    store.set(f"rank{rank}", "")
    while missing := [other for other in range(size) if not store.check([f"rank{other}"])]:
        wait(f"rank {missing[0]} is not there, and {len(missing)} of {size} are missing")
    return store


def _listen(host: str, port: int) -> int:
    """Return a socket that listens at the address alone. Raises ConfigError if that is not possible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Many systems give a machine's own name such an address.
        if str(address[0]).startswith("127.") and host not in ("127.0.0.1", "localhost"):
            raise ConfigError(f"MASTER_ADDR = {host} is {address[0]} here, where no other node is: name its address")
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at MASTER_ADDR = {host}, port {port} ({error.strerror}): name an address of its "
            "node that no other trainer uses; NODE_RANK is 0 there, and nowhere else"
        ) from error


def _choose_interface(host: str) -> None:
    """Have gloo and NCCL use the interface of the route to a host, unless the environment names one."""
    family, kind, _, _, address = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent.
        probe.connect(address)
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            # Some have no IPv4 address.
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == own:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _notice_silence() -> None:
    """Have the kernel end this process's connections to a node that has not answered for _SILENT_SECONDS.

    gloo has no option for it: https://github.com/facebookincubator/gloo/blob/main/gloo/transport/tcp/socket.cc.
    """
    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // _PROBES),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // _PROBES),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES - 1),
        # For data that has been sent and not acknowledged; in milliseconds.
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000),
    ]
    for name in os.listdir("/proc/self/fd"):
        # Sockets of other kinds do not have the options.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as own:
                    for option in options:
                        own.setsockopt(*option)


@contextlib.contextmanager
def until_lost() -> Iterator[None]:
    """Raise RankLost for the errors that gloo and NCCL raise when another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST):
            reason = str(error).splitlines()[0][:300]
            raise RankLost(f"another process of this trainer has ended, or cannot be reached: {reason}") from error
        raise


def shard(scorer: nn.Module, layer_types: Collection[str], ranks: Ranks, *, autocast: bool) -> None:
    """Shard a scorer's model over the ranks, in place: its parameters become DTensors, of rank 0's weights.

    `layer_types` are the class names of the layers that are gathered one at a time. On ranks other than 0 the model may
    be on the meta device. Raises ConfigError, on every rank, if it has other tensors there.
    """
    _check_same(scorer, ranks)
    half = torch.bfloat16 if autocast else None
    policy = MixedPrecisionPolicy(half, torch.float32 if autocast else None, cast_forward_inputs=False)
    for module in list(scorer.modules()):
        if type(module).__name__ in layer_types:
            _receive(module, ranks)
            fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
    _receive(scorer, ranks)
    fully_shard(scorer, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The ranks' parts of the loss add up, so gradients are summed and not averaged. With the factor alone,
            # FSDP would use a scaled sum, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check_same(scorer: nn.Module, ranks: Ranks) -> None:
    """Raise ConfigError if the ranks do not have the same tensors: they would wait for each other's broadcasts.

    Rank 0 has them from the files, where two weights may differ that are one by config.json, from which the others are.
    """
    tensors = [*scorer.parameters(), *scorer.buffers()]
    own = torch.tensor([len(tensors), sum(tensor.numel() for tensor in tensors)])
    if not torch.equal(ranks.sum(own), ranks.size * own):
        raise ConfigError(
            "the model's files have other weights than its config.json describes, which several processes need: if "
            "they have an output head of its own, set tie_word_embeddings = false in config.json"
        )


def _receive(module: nn.Module, ranks: Ranks) -> None:
    """Give rank 0's weights and buffers to a module on all ranks, on the device. Weights that are sharded stay."""
    assert ranks.mesh is not None
    # By the identity of the old tensor, which is kept, so that tied weights stay one.
    new: dict[int, tuple[Tensor, Tensor]] = {}
    for owner in module.modules():
        for name, old in (*owner._parameters.items(), *owner._buffers.items()):
            if old is None or isinstance(old, DTensor):
                continue
            if id(old) not in new:
                new[id(old)] = old, _from_rank_0(old, ranks)
            tensors: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            tensors[name] = new[id(old)][1]


def _from_rank_0(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return rank 0's values of a tensor, on the device. On rank 0 the tensor itself moves, which frees the host's."""
    assert ranks.mesh is not None
    device = ranks.mesh.device_type
    if ranks.rank == 0:
        tensor.data = tensor.data.to(device).contiguous()
    else:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        tensor = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    # As bytes: gloo does not have all dtypes.
    dist.broadcast(tensor.data.view(-1).view(torch.uint8), src=0)
    return tensor


def set_gathering(scorer: nn.Module, *, keep: bool, last: bool) -> None:
    """Say before each backward pass of a step whether it is the `last`: only that one adds gradients over the nodes.

    With `keep`, gathered weights and unreduced gradients stay on each rank between the micro-batches: the first one
    gathers the weights; the last one frees them and reduces the gradients.
    """
    assert isinstance(scorer, FSDPModule)
    if not keep:
        scorer.set_requires_all_reduce(last)
        return
    scorer.set_reshard_after_forward(False)
    scorer.set_reshard_after_backward(last)
    scorer.set_requires_gradient_sync(last)


def release_gathered(scorer: nn.Module) -> None:
    """Free gathered weights that a forward pass without a backward pass has left. Does nothing to other modules."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Gather a sharded tensor from all ranks, each of which must call this; return any other tensor as it is.

    With a sharded `like`, `tensor` is this rank's shard on the host, of a tensor that is sharded like it.
    """
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        device, shape, stride = like.to_local().device, like.shape, like.stride()
        tensor = DTensor.from_local(
            tensor.to(device), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        )
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
