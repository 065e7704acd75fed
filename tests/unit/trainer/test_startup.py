"""What a trainer refuses before it loads a model: another torch, or other nodes, than the configuration needs."""

import socket
import threading

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tba.common.config import Config
from tba.common.errors import ConfigError
from tba.tests.process.conftest import free_port
from tba.trainer import distributed
from tba.trainer.distributed import _meet, join
from tba.trainer.step.build import prepare


@pytest.mark.parametrize("name", ["set_gradient_divide_factor", "set_force_sum_reduction_for_comms"])
def test_ranks_do_not_join_with_a_torch_whose_fsdp_lacks_a_method(monkeypatch, name):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delattr(FSDPModule, name)
    with pytest.raises(ConfigError, match=rf"torch 2\.9 or newer, and torch {torch.__version__[:4]}.*has no {name}\)"):
        join(torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join(torch.device("cpu")).size == 1


def test_exact_logits_on_a_gpu_need_a_product_that_adds_in_float32(monkeypatch):
    config = Config.model_validate({"model": {"head_dtype": "float32", "dtype": "bfloat16"}})
    monkeypatch.setattr(torch.ops.aten.mm, "overloads", lambda: ["default", "out"])
    with pytest.raises(ConfigError, match=r'head_dtype = "float32" needs torch 2\.8 or newer.*or set it to "model"'):
        prepare(config, "cuda:0")
    others = Config.model_validate({"model": {"head_dtype": "model", "dtype": "bfloat16"}})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees none"):
            prepare(others, "cuda:0")


@pytest.fixture
def port(monkeypatch):
    """The port at which rank 0 of two ranks waits for the other, at one address."""
    stop, port = threading.Event(), free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))

    def wait_for_rank_1() -> None:
        # The thread ends as the process of a rank would.
        with pytest.raises(SystemExit):
            _meet("127.0.0.1", 0, 2, stop.is_set)

    rank_0 = threading.Thread(target=wait_for_rank_1)
    rank_0.start()
    yield port
    stop.set()
    rank_0.join()


def test_ranks_meet_at_one_address_and_expect_the_same_number(port):
    with pytest.raises(ConfigError, match="2 processes train at .*, here 3: give all nodes the same number"):
        _meet("127.0.0.1", 1, 3, lambda: False)
    # A socket of all interfaces would answer here, too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


@pytest.mark.parametrize(("host", "reason"), [
    ("127.0.1.1", "is 127.0.1.1 here, where no other node is"),
    ("192.0.2.1", "an address of its node that no other trainer uses; NODE_RANK is 0 there, and nowhere else"),
])  # fmt: skip
def test_rank_0_listens_only_where_other_nodes_reach_it(monkeypatch, host, reason):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ConfigError, match=reason):
        _meet(host, 0, 2, lambda: False)


def test_nodes_have_equally_many_ranks(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="WORLD_SIZE = 3 is no multiple of LOCAL_WORLD_SIZE = 2"):
        join(torch.device("cpu"))


def test_a_node_that_waits_says_why_and_a_name_that_is_unknown_is_refused(monkeypatch):
    reasons: list[str] = []
    monkeypatch.setattr(distributed.log, "warning", lambda _, **fields: reasons.append(fields["reason"]))
    monkeypatch.setattr(distributed, "_TELL_SECONDS", 0.0)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    told = iter([False, False, True])
    with pytest.raises(SystemExit):
        _meet("127.0.0.1", 1, 2, lambda: next(told))
    assert reasons == ["node 0 does not answer (Connection refused)"] * 2
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = no-such-host.invalid is not known here"):
        _meet("no-such-host.invalid", 1, 2, lambda: False)


def test_a_host_name_that_is_loopback_here_is_refused(monkeypatch):
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = node0 is 127.0.0.1 here"):
        _meet("node0", 0, 2, lambda: False)
