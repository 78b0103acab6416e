"""Which address an engine listens on."""

import pytest

from hvd_adpsgd.engine import interfaces, shared_memory
from hvd_adpsgd.engine.interfaces import LOOPBACK, addresses, choose_address
from hvd_adpsgd.errors import TopologyError

BRIDGE = ("docker0", "172.17.0.1")


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By address: the source that the system chooses for it."""
    found: dict[str, str] = {}
    monkeypatch.setattr(interfaces, "_source_towards", found.get)
    return found


def test_one_host_uses_loopback() -> None:
    assert choose_address(None, "a", [("a", [("eth0", "10.0.0.1")]), ("a", [])]) == LOOPBACK


def test_the_address_is_the_one_that_reaches_the_first_other_host(routes: dict[str, str]) -> None:
    routes.update({"10.0.1.1": "10.0.0.1", "10.0.0.1": "10.0.1.1"})
    known = [("a", [("eth0", "10.0.0.1")]), ("b", [("eth0", "10.0.1.1")])]
    assert choose_address(None, "a", known) == "10.0.0.1"
    assert choose_address(None, "b", known) == "10.0.1.1"


def test_a_bridge_that_every_host_has_is_passed_over(routes: dict[str, str]) -> None:
    routes.update({"172.17.0.1": "172.17.0.1", "10.0.0.2": "10.0.0.1"})
    known = [("a", [BRIDGE, ("eth0", "10.0.0.1")]), ("b", [BRIDGE, ("eth0", "10.0.0.2")])]
    assert choose_address(None, "a", known) == "10.0.0.1"


def test_without_a_route_the_error_names_the_addresses(routes: dict[str, str]) -> None:
    known = [("a", []), ("b", [("eth0", "10.0.0.2")])]
    with pytest.raises(TopologyError, match=r"10\.0\.0\.2.*HVD_ADPSGD_NICS"):
        choose_address(None, "a", known)


def test_named_interfaces_are_taken_in_their_order() -> None:
    known = [("a", [("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")])]
    assert choose_address("ib0, eth0", "a", known) == "10.1.0.1"
    assert choose_address("eth1,eth0", "a", known) == "10.0.0.1"
    assert choose_address("lo", "a", known) == LOOPBACK


def test_an_unknown_interface_is_named_with_those_there_are() -> None:
    with pytest.raises(TopologyError, match="HVD_ADPSGD_NICS=eth7.*has eth0"):
        choose_address("eth7", "a", [("a", [("eth0", "10.0.0.1")])])


def test_this_host_has_no_loopback_among_its_addresses() -> None:
    assert not [
        address for _, address in addresses() if address.startswith(("127.", "::1", "fe80"))
    ]


def test_a_route_is_asked_of_the_system() -> None:
    assert interfaces._source_towards(LOOPBACK) == LOOPBACK
    assert interfaces._source_towards("255.255.255.255") is None


def test_clones_of_one_machine_are_two_hosts(routes: dict[str, str]) -> None:
    """They share boot id and namespace number, as they were resumed from one snapshot of memory."""
    routes["10.0.0.2"] = "10.0.0.1"
    one, other = "boot:clone1:4026531840", "boot:clone2:4026531840"
    known = [(one, [BRIDGE, ("eth0", "10.0.0.1")]), (other, [BRIDGE, ("eth0", "10.0.0.2")])]
    assert choose_address(None, one, known) == "10.0.0.1"


def test_containers_that_share_a_network_are_one_host(routes: dict[str, str]) -> None:
    """Under host names of their own: they have the same addresses."""
    one, other = "boot:container1:5", "boot:container2:5"
    known = [(name, [BRIDGE, ("eth0", "10.0.0.1")]) for name in (one, other)]
    assert choose_address(None, one, known) == LOOPBACK


def test_the_host_name_tells_clones_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for host in ("clone1", "clone2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        names.append((interfaces.network_name(), shared_memory.host_name()))
    assert names[0][0] != names[1][0] and names[0][1] != names[1][1]
