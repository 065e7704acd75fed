"""The machines on which the other tests of this folder rest."""


def test_a_node_has_systemd_a_network_and_a_disk_of_its_own(fleet, node):
    assert node.run("systemctl", "is-system-running").stdout == "running\n"
    assert fleet.ssh(node, "hostname").stdout == "node1\n"
    fleet.ssh(node, "touch", "/etc/of-the-node")
    node.cut()
    assert fleet.ssh(node, "true", check=False).returncode == 255
    node.connect()
    node.power_off()
    node.start()
    assert fleet.ssh(node, "ls", "/etc/of-the-node").stdout == "/etc/of-the-node\n"
