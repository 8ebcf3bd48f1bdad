"""Secrets are hidden by name, place and prefix, in linear time."""

from __future__ import annotations

import itertools
import time

import pytest

from agentrl.observe.logging import redact, redact_and_cut

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
SLACK = "xoxb-" + "2048-4096-AbCdEfGhIj"
GITLAB = "glpat-" + "AbCdEf0123456789_-xy"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mongodb://user:pa%40ss@h1:1,h2:2/db?x=1", "mongodb://***@h1:1,h2:2/db?x=1"),
        ("mongodb+srv://user:p@ss@host/db", "mongodb+srv://***@host/db"),
        ("{'Authorization': 'Bearer abc.def'}", "{'Authorization': '***'}"),
        ("authorization: Basic dXNlcjpwYXNz", "authorization: ***"),
        ("sent Bearer abcdefgh12345", "sent Bearer ***"),
        ("OPENAI_API_KEY=abc123 x", "OPENAI_API_KEY=*** x"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": "***", "n": 1}'),
        ('"{\\"api_key\\": \\"abc\\"}"', '"{\\"api_key\\": \\"***"}"'),
        ("http://h/p?token=abc&n=1", "http://h/p?token=***&n=1"),
        ("key sk-proj-abcdefghij0123456789 used", "key *** used"),
        ("token=abc", "token=***"),
        ("GITHUB_TOKEN=abc", "GITHUB_TOKEN=***"),
        ('{"token": "abc"}', '{"token": "***"}'),
        ("to?next=%2Fa%3Ftoken%3Dabc", "to?next=%2Fa%3Ftoken%3D***"),
        ("npx server --api-key abc --port 3", "npx server --api-key *** --port 3"),
        ("['--token', 'abc']", "['--token', '***']"),
        ("https://h/x?sig=abc&v=1", "https://h/x?sig=***&v=1"),
        ('password="correct horse battery" x', 'password="***" x'),
        ("AKIAIOSFODNN7EXAMPLE in us-east-1", "*** in us-east-1"),
        (f"AKIAIOSFODNN7EXAMPLE:{AWS_SECRET}", "***"),
        (f"aws_secret_access_key = {AWS_SECRET}", "aws_secret_access_key = ***"),
        (f"got {JWT}, late", "got ***, late"),
        (f"git: {GITLAB}", "git: ***"),
        (f"post failed: {SLACK}", "post failed: ***"),
        ("https://hooks.slack.com/services/T00/B00/XXXX", "https://hooks.slack.com/services/***"),
        (f"cert\n{PEM}\nend", "cert\n-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nend"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEow", "-----BEGIN PRIVATE KEY-----***"),
        (repr(f"a\n{GITLAB}"), "'a\\n***'"),
    ],
)
def test_secrets_are_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "mongodb://127.0.0.1:27017/demo",
        "tokens=12 token_level_loss=True",
        "mail a@b.org",
        "a://b c@d",
        "eos_token=</s> max_tokens=4096 tokens_per_token=0.5",
        "token=9531 is outside the vocabulary",
        "invalid token: expected a comma",
        "a task-oriented-dialogue-system",
        "--mcp_auth_token_env MCP_AUTH_TOKEN --save_steps 3",
        "eyJust.a.word",
        "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


PIECES = (
    "a", "A-", "eyJ", "eyJa.", "://", "a://", "a@", "token=", 'token"', "secret", "secret ", 'secret="', "'",
    "\\", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "authorization: ", "bearer ", "-", "--a", "--key ",
    "?key=", "sk-", "AKIA", "xoxb-", "glpat-", "%3D", "key:\t", "hooks.slack.com/services/", " ", "\n", "0",
)  # fmt: skip


def _seconds(text: str) -> float:
    start = time.process_time()
    redact(text)
    return time.process_time() - start


def test_the_time_is_linear_in_the_length() -> None:
    """64 times the text takes about 64 times as long; a quadratic rule would take 4096 times as long."""
    pairs = itertools.islice(itertools.permutations(PIECES, 2), 0, None, 71)
    for piece in (*PIECES, *map("".join, pairs)):
        short, long = ((piece * (size // len(piece) + 1))[:size] for size in (1_000, 64_000))
        least = max(min(_seconds(short) for _ in range(3)), 20e-6)
        assert _seconds(long) < 64 * 8 * least, piece


def test_a_word_of_a_million_letters_is_fast() -> None:
    assert _seconds("a" * 10**6) < 10
    assert len(redact_and_cut("a" * 10**8, 1000)) < 1100


@pytest.mark.parametrize("before", range(1900, 2101, 7))
def test_a_secret_that_a_cut_divides_is_not_shown(before: int) -> None:
    text = "password=x " * 200 + "y" * before + " " + AWS_SECRET.join(("AKIAIOSFODNN7EXAMPLE:", " end"))
    assert "AKIA" not in redact_and_cut(text, 2000)
    assert len(redact_and_cut(text, 2000)) < 2050
