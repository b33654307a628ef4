"""Webhooks, the pure part: bodies and signatures, which URLs and addresses may be called, when to try again."""

from __future__ import annotations

import base64
import json
from ipaddress import ip_address

import openai
import pytest

from service.core.model import BatchStatus, Outcome
from service.core.webhook import (
    MAX_TRIES,
    batch_event,
    event_body,
    is_delivered,
    is_final,
    job_event,
    may_call,
    parse_url,
    retry_delay_seconds,
    secret_text,
    signed_headers,
)

SECRET = bytes(range(32))


def test_the_signature_is_that_of_the_standard() -> None:
    """The example of the Standard Webhooks specification's reference libraries."""
    headers = signed_headers(
        event_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        sent_at=1614265330,
        body=b'{"test": 2432232314}',
        secret=base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    )
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("status", [status for status in BatchStatus if status.is_terminal])
def test_the_sdk_reads_an_event_of_a_batch(status: BatchStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    body = event_body(event_id="evt_1", event_type=batch_event(status), created_at=17, subject="batch_1")
    assert json.loads(body) == {
        "id": "evt_1",
        "object": "event",
        "created_at": 17,
        "type": f"batch.{status}",
        "data": {"id": "batch_1"},
    }
    monkeypatch.setattr("openai.lib._webhooks.time.time", lambda: 1_000.0)
    headers = signed_headers(event_id="evt_1", sent_at=1_000, body=body, secret=SECRET)
    client = openai.OpenAI(api_key="none", webhook_secret=secret_text(SECRET))
    event = client.webhooks.unwrap(body, headers)
    assert (event.id, event.type, event.created_at) == ("evt_1", f"batch.{status}", 17)
    for changed in (
        {**headers, "webhook-id": "evt_2"},
        {**headers, "webhook-timestamp": "1001"},
        signed_headers(event_id="evt_1", sent_at=1_000, body=body, secret=b"another" * 4),
    ):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body, changed)


def test_only_ends_have_events() -> None:
    with pytest.raises(ValueError, match="finalizing"):
        batch_event(BatchStatus.FINALIZING)
    assert {outcome: job_event(outcome) for outcome in Outcome} == {
        Outcome.SUCCEEDED: "job.succeeded",
        Outcome.FAILED: "job.failed",
        Outcome.CANCELLED: "job.failed",
        Outcome.EXPIRED: "job.failed",
    }


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://hooks.example", "hooks.example", 80, "/"),
        ("HTTPS://Hooks.Example.:443/a/b?c=d&e#f", "hooks.example", 443, "/a/b?c=d&e"),
        ("https://hooks.example:8443/", "hooks.example:8443", 8443, "/"),
        ("http://hooks.example:443/", "hooks.example:443", 443, "/"),
        ("http://[2600::1]:8080/x", "[2600::1]:8080", 8080, "/x"),
        ("https://[2600::1]?q", "[2600::1]", 443, "/?q"),
        ("https://b\u00fccher.example/x%20y", "xn--bcher-kva.example", 443, "/x%20y"),
    ],
)
def test_urls_that_may_be_called(url: str, host: str, port: int, path: str) -> None:
    target = parse_url(url)
    assert target is not None
    assert (target.host, target.port, target.path) == (host, port, path)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example",
        "//hooks.example/x",
        "ftp://hooks.example",
        "file:///etc/passwd",
        "http://",
        "http:///x",
        "http://[",
        "http://user@hooks.example/",
        "http://user:password@hooks.example/",
        "http://@hooks.example/",
        "http://hooks.example\\@inside/",
        "http://hooks.example:22/",
        "http://hooks.example:0/",
        "http://hooks.example:65536/",
        "http://hooks.example:x/",
        "http://hooks..example/",
        "http://[fe80::1%25eth0]/",
        "http://hooks.example/a b",
        "http://hooks.example/\u00e4",
        "http://hooks.example/?q=\u00e4",
        "http://hooks.example/\n",
        "http://hooks.example/\0",
        "http://\ud800.example/",
        "http://hooks.example/" + "x" * 2_048,
    ],
)
def test_urls_that_may_not(url: str) -> None:
    assert parse_url(url) is None


OPEN = ["1.1.1.1", "100.63.255.255", "100.128.0.0", "172.15.0.1", "172.32.0.1", "223.255.255.254", "2600::1"]
OPEN += ["2a00:1450:4001::1", "64:ff9b::101:101"]
CLOSED = ["0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.8.8.8", "169.254.1.1", "172.16.0.1", "172.31.255.255"]
CLOSED += ["192.0.0.8", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1"]
CLOSED += ["240.0.0.1", "255.255.255.255", "::", "::1", "::ffff:1.1.1.1", "::ffff:127.0.0.1", "::127.0.0.1"]
CLOSED += ["64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "3fff::1"]
CLOSED += ["5f00::1", "fc00::1", "fd12::1", "fe80::1", "fe80::1%1", "fec0::1", "ff02::1"]
METADATA = ["169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254"]
METADATA += ["::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254%1"]


@pytest.mark.parametrize("address", OPEN)
def test_addresses_of_servers_on_the_internet(address: str) -> None:
    assert may_call(ip_address(address), allow_private=False)
    assert may_call(ip_address(address), allow_private=True)


@pytest.mark.parametrize("address", CLOSED)
def test_addresses_that_have_to_be_allowed(address: str) -> None:
    assert not may_call(ip_address(address), allow_private=False)
    assert may_call(ip_address(address), allow_private=True)


@pytest.mark.parametrize("address", METADATA)
def test_addresses_that_are_never_called(address: str) -> None:
    assert not may_call(ip_address(address), allow_private=False)
    assert not may_call(ip_address(address), allow_private=True)


def test_five_tries_each_wait_longer_than_the_last() -> None:
    assert [retry_delay_seconds(tries, 10.0) for tries in range(1, MAX_TRIES)] == [10.0, 80.0, 640.0, 5_120.0]
    assert retry_delay_seconds(MAX_TRIES, 10.0) is None


def test_what_an_answer_means() -> None:
    assert [code for code in (200, 202, 204, 299) if not is_delivered(code)] == []
    assert [code for code in (199, 301, 307, 400, 404, 410, 429, 500) if is_delivered(code)] == []
    assert [code for code in (200, 301, 400, 404, 410, 429, 500) if is_final(code)] == [410]
