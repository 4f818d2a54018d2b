import socket

import pytest

from integration.ground import machine
from integration.ground.errors import UserError


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127.0.0.1 cannot be used .* --port"):
            machine.free_port(port)


def test_no_free_port_is_said(monkeypatch):
    def full(self, address):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", full)
    with pytest.raises(UserError, match=r"no free port on 127\.0\.0\.1 .* --port"):
        machine.free_port(None)


def test_a_port_beyond_the_range_is_refused():
    with pytest.raises(UserError, match="port 70000"):
        machine.free_port(70000)


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="install gcc, or set CC"):
        machine.require_compiler()
    compiler = tmp_path / "cc"
    compiler.touch(mode=0o755)
    machine.require_compiler()
