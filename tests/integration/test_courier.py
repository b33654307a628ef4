"""The courier: which connections it makes, and that no receiver can keep it longer than it may."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest
from hook_server import HookServer, receiving

from service.core.webhook import Target, parse_url
from service.courier import Address, Answer, Courier, CourierStopped
from service.ports import free_port

pytestmark = pytest.mark.embedded_only

LOOPBACK = "127.0.0.1"


@pytest.fixture
def receiver() -> Iterator[HookServer]:
    with receiving(HookServer()) as server:
        yield server


def names(*answers: Sequence[str]) -> Callable[[str, int], Sequence[Address]]:
    """A name server that gives these answers, one a question, and fails when it is asked once more."""
    left = list(answers)

    def resolve(hostname: str, port: int) -> Sequence[Address]:
        return [ip_address(address) for address in left.pop(0)]

    return resolve


def target_of(url: str) -> Target:
    target = parse_url(url)
    assert target is not None
    return target


def send(courier: Courier, url: str, *, allow_private: bool = True, timeout_seconds: float = 5.0) -> Answer:
    return courier.send(
        target_of(url),
        {"content-type": "application/json"},
        b"{}",
        allow_private=allow_private,
        timeout_seconds=timeout_seconds,
        stopping=threading.Event(),
    )


def test_a_name_is_resolved_once_and_the_connection_goes_where_it_was_judged(receiver: HookServer) -> None:
    """A name that is public when it is judged and private a moment later gains nothing: nobody asks a second time."""
    courier = Courier(resolve=names([LOOPBACK], ["169.254.169.254"]))
    answer = send(courier, f"http://hooks.example:{receiver.port}/x?y=z")
    assert answer == Answer(status_code=200)
    (hook,) = receiver.hooks
    assert (hook.path, hook.headers["host"]) == ("/x?y=z", f"hooks.example:{receiver.port}")


@pytest.mark.parametrize(
    "answer",
    [["127.0.0.1"], ["::1"], ["10.0.0.1"], ["::ffff:127.0.0.1"], ["100.64.0.1"], ["1.1.1.1", "127.0.0.1"], []],
)
def test_a_name_of_a_private_address_is_not_called(receiver: HookServer, answer: list[str]) -> None:
    courier = Courier(resolve=names(answer))
    refused = send(courier, f"http://hooks.example:{receiver.port}/", allow_private=False)
    assert refused == Answer(error="address_refused", is_refused=True)
    assert receiver.hooks == []


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "127.1", "0x7f.1", "2130706433", "[::1]", "[::ffff:7f00:1]"]
)
def test_an_address_in_disguise_is_not_called(receiver: HookServer, name: str) -> None:
    """Through the system's own resolver, which knows all these spellings."""
    refused = send(Courier(), f"http://{name}:{receiver.port}/", allow_private=False)
    assert refused.error in ("address_refused", "name_not_found")
    assert receiver.hooks == []


def test_metadata_services_are_never_called() -> None:
    for address in ("169.254.169.254", "fd00:ec2::254"):
        assert send(Courier(resolve=names([address])), "http://hooks.example/").error == "address_refused"


def test_a_name_that_nobody_has() -> None:
    assert send(Courier(), "http://nobody.invalid/").error == "name_not_found"


def test_redirects_are_not_followed(receiver: HookServer) -> None:
    receiver.manner.statuses.append(307)
    receiver.manner.location = f"http://{LOOPBACK}:{receiver.port}/inside"
    assert send(Courier(), receiver.url) == Answer(status_code=307, error="http_307")
    assert [hook.path for hook in receiver.hooks] == ["/hook?key=querysecret"]


def test_the_proxies_of_the_environment_are_not_used(receiver: HookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{LOOPBACK}:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "")
    assert send(Courier(), receiver.url).status_code == 200


def test_an_answer_is_not_read_beyond_its_status(receiver: HookServer) -> None:
    receiver.manner.body = b"x" * 100_000_000
    started = time.monotonic()
    assert send(Courier(), receiver.url).status_code == 200
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("manner", ["hangs", "drips"])
def test_a_receiver_that_is_slow_is_left_in_time(receiver: HookServer, manner: str) -> None:
    """Also one that sends a byte now and then, which no limit of a single read would end."""
    setattr(receiver.manner, manner, True)
    started = time.monotonic()
    assert send(Courier(), receiver.url, timeout_seconds=0.5) == Answer(error="timeout")
    assert 0.4 < time.monotonic() - started < 5


def test_a_port_that_nobody_listens_at() -> None:
    assert send(Courier(), f"http://{LOOPBACK}:{free_port()}/") == Answer(error="not_connected")


def test_the_next_address_is_tried_where_one_takes_no_connection(receiver: HookServer) -> None:
    courier = Courier(resolve=names(["127.0.0.9", LOOPBACK]))
    assert send(courier, f"http://hooks.example:{receiver.port}/").status_code == 200
    assert len(receiver.hooks) == 1


def test_an_answer_that_is_no_http() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"SSH-2.0-something\r\n\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        answer = send(Courier(), f"http://{LOOPBACK}:{listener.getsockname()[1]}/")
        thread.join()
    assert answer == Answer(error="broken_answer")


def test_a_process_that_stops_does_not_wait_for_a_receiver(receiver: HookServer) -> None:
    receiver.manner.hangs = True
    stopping = threading.Event()
    watcher = threading.Thread(target=lambda: (receiver.wait_for(1), stopping.set()))
    watcher.start()
    started = time.monotonic()
    with pytest.raises(CourierStopped):
        Courier().send(target_of(receiver.url), {}, b"{}", allow_private=True, timeout_seconds=60.0, stopping=stopping)
    assert time.monotonic() - started < 20
    watcher.join()


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of hooks.example that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hooks.example"]
    names = ["-addext", "subjectAltName=DNS:hooks.example"]
    subprocess.run(
        [*command, *names, "-out", str(files[0]), "-keyout", str(files[1])], check=True, capture_output=True, timeout=60
    )
    return files


@pytest.fixture
def secure(certificate: tuple[Path, Path]) -> Iterator[HookServer]:
    server = HookServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.sni_callback = lambda _, name, __: server.asked_names.append(name)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with receiving(server):
        yield server


def trusting(certificate: tuple[Path, Path], resolve: Callable[[str, int], Sequence[Address]]) -> Courier:
    courier = Courier(resolve=resolve)
    courier.tls.load_verify_locations(certificate[0])
    return courier


def test_the_certificate_is_checked_against_the_name_and_not_the_address(
    secure: HookServer, certificate: tuple[Path, Path]
) -> None:
    courier = trusting(certificate, names([LOOPBACK]))
    assert send(courier, f"https://hooks.example:{secure.port}/") == Answer(status_code=200)
    assert secure.asked_names == ["hooks.example"]
    other = replace(courier, resolve=names([LOOPBACK]))
    other.tls.load_verify_locations(certificate[0])
    assert send(other, f"https://elsewhere.example:{secure.port}/") == Answer(error="bad_certificate")
    assert len(secure.hooks) == 1


def test_a_certificate_that_nobody_vouches_for(secure: HookServer) -> None:
    courier = Courier(resolve=names([LOOPBACK]))
    assert send(courier, f"https://hooks.example:{secure.port}/") == Answer(error="bad_certificate")
    assert secure.hooks == []
