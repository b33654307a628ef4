"""The commonest errors of a batch, out of counted samples."""

from __future__ import annotations

import json

from service.core.errorcount import MAX_MESSAGE_CHARACTERS, ErrorSample, TopError, top_errors


def refused(message: str, count: int = 1, code: object = None, status: int = 400) -> ErrorSample:
    answer = json.dumps({"error": {"message": message, "code": code}}).encode()
    return ErrorSample(count=count, status_code=status, response=answer)


def test_the_words_are_those_of_the_error_file() -> None:
    samples = [
        refused("no such field", 3, code="bad_field"),
        ErrorSample(count=2, code="engine_crash"),
        ErrorSample(count=1, skipped_for="invalid_url", message="The url is wrong."),
        ErrorSample(count=4, status_code=502, response=b"<html>"),
        ErrorSample(count=5, status_code=500),  # too long to be a message
    ]
    assert top_errors(samples) == [
        TopError(code=None, message="The engine answered with status 500.", count=5),
        TopError(code=None, message="The engine answered with status 502.", count=4),
        TopError(code="bad_field", message="no such field", count=3),
        TopError(code="engine_crash", message="The engine died each time it worked on this line.", count=2),
        TopError(code="skipped_invalid_line", message="invalid_url: The url is wrong.", count=1),
    ]


def test_what_differs_in_numbers_is_counted_together() -> None:
    samples = [refused("asked for 10 of 5 tokens", 2), refused("asked for 7000 of 5 tokens"), refused("asked for some")]
    assert top_errors(samples) == [
        TopError(code=None, message="asked for 10 of 5 tokens", count=3),
        TopError(code=None, message="asked for some", count=1),
    ]


def test_the_code_keeps_errors_apart() -> None:
    assert len(top_errors([refused("x", code="a"), refused("x", code="b")])) == 2


def test_the_list_and_its_messages_are_bounded() -> None:
    many = [refused("x" * n, count=n) for n in range(1, 30)]
    found = top_errors(many)
    assert [error.count for error in found] == list(range(29, 19, -1))
    assert len(top_errors([refused("y" * 10_000)])[0].message) == MAX_MESSAGE_CHARACTERS
