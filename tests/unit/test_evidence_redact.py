"""A secret never survives; ordinary text does."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stallwatch.evidence.redact import (
    MASK,
    Redactor,
    hash_request_id,
    redact,
    redact_argv,
    redact_env,
    redact_lines,
    redact_log,
)

# At least one capital X and Q: no word of the templates below is a part of it.
SECRET = st.text(string.ascii_letters + string.digits + "+/=_.~!%&-", min_size=4, max_size=40).map(
    lambda s: f"XQ{s}QX"
)
NAMES = st.sampled_from(
    [
        "API_KEY",
        "OPENAI_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "VLLM_API_KEY",
        "MY_LONG_APP_X_TOKEN",
        "A_B_C_D_E_F_G_H_I_J_K_SECRET",
        "PGPASSWORD",
        "api_key",
        "api-key",
        "hf_token",
        "token",
        "password",
        "client-secret",
        "apiKey",
        "accessToken",
        "clientSecret",
        "dbPassword",
        "config.api_key",
        "private_key",
    ]
)
TEMPLATES = st.sampled_from(
    [
        "{name}={secret}",
        "export {name}={secret}; run",
        "{name}: {secret}",
        '{{"{name}": "{secret}", "model": "m"}}',
        "{{'{name}': '{secret}'}}",
        "{{'{name}': ['{secret}', '{secret}']}}",
        "--{name} {secret}",
        "--{name}={secret} --port 8000",
        "Namespace(model='m', {name}='{secret}')",
        "['vllm', '--{name}', '{secret}']",
        "https://host/path?{name}={secret}",
    ]
)
FIXED = st.sampled_from(
    [
        "Authorization: Bearer {secret}",
        "curl -H 'Authorization: Basic {secret}' http://x",
        "bearer {secret}",
        '{{"authorization": "Token {secret}"}}',
        "hf_{bare}",
        "sk-{bare}",
        "token ghp_{bare}{bare}",
        "cloning https://user:{bare}@host/x.git",
        "redis://:{bare}@localhost:6379/0",
    ]
)
ORDINARY = [
    "vllm serve MODEL --max-tokens 5 --tokenizer /m --max-num-batched-tokens 8192 --port 8000",
    "bos_token=<s> eos_token_id=2 pad_token='<pad>' max_tokens=16 num_tokens: 5",
    "gateway --first-token 120000.000ms --between-tokens 60s; time_per_output_token: 5ms",
    "INFO 11-30 10:00:00 [core.py:58] KV cache size: 12,345 tokens, key-value heads 8",
    "http://127.0.0.1:8000/v1/models?a=b@c",
    "mail me@example.org: the secret garden is a book; the password was wrong",
    "primary_key=5 cache_key=3 keyboard=de",
    "Basic usage of bearers",
    '--compilation-config {"level": 3, "mode": \'x\'}',
    "",
]


@pytest.mark.slow
@settings(deadline=None)  # a loaded machine is no failure
@given(TEMPLATES, NAMES, SECRET)
def test_a_named_secret_never_survives(template, name, secret):
    """Under any secret name, in any usual way to write an assignment, the value is gone."""
    out = redact(template.format(name=name, secret=secret))
    assert secret not in out
    assert MASK in out


@pytest.mark.slow
@settings(deadline=None)  # a loaded machine is no failure
@given(FIXED, SECRET, st.text(string.ascii_letters + string.digits, min_size=12, max_size=30))
def test_a_recognisable_secret_never_survives(template, secret, bare):
    """Bearer tokens, well-known prefixes and passwords in URLs are gone without any name."""
    assume(bare.lower() not in "authorization")
    out = redact(template.format(secret=secret, bare=bare))
    assert secret not in out
    assert bare not in out


@pytest.mark.slow
@settings(deadline=None)  # a loaded machine is no failure
@given(NAMES.filter(lambda n: "." not in n), SECRET, SECRET, st.booleans())
def test_a_secret_argument_never_survives(name, one, two, dashed):
    """A secret that is an argument of its own is gone, the second of two as well."""
    argv = ["vllm", "serve", f"--{name}", f"-{one}" if dashed else one, two, "--port", "80"]
    out = redact_argv(argv)
    assert not any(one in item or two in item for item in out)
    assert out[-2:] == ("--port", "80")
    assert len(out) == len(argv)


@settings(deadline=None)  # a loaded machine is no failure
@given(NAMES, SECRET)
def test_an_environment_value_never_survives(name, secret):
    """By its name, or by its look under a harmless name."""
    out = redact_env({name: secret, "HOME": "/root", "URL": f"http://u:{'p' * 9}@h"})
    assert out == {name: MASK, "HOME": "/root", "URL": "http://***@h"}


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_unchanged(text):
    """Words that only resemble secrets stay: tokens, tokenizers, keys of caches, addresses."""
    assert redact(text) == text


@settings(deadline=None)  # a loaded machine is no failure
@given(st.text(string.ascii_lowercase + " ,.;()0123456789", max_size=200))
def test_prose_is_unchanged(text):
    """Text without an assignment, a URL or a bearer is not touched."""
    assume("bearer" not in text)
    assert redact(text) == text


def test_prompts_and_request_ids_leave_the_log():
    """What vLLM logs of a request keeps neither its prompt nor its id, but ids still match."""
    line = "Received request chatcmpl-0123456789ab: prompt: 'Tell me', params: X(n=1), done"
    out = redact_log(line, salt="s")
    assert "Tell me" not in out
    assert hash_request_id("chatcmpl-0123456789ab", salt="s") in out
    assert "params: X(n=1)" in out
    body = '{"messages": [{"role": "user", "content": "private words"}], "n": 1}'
    assert "private" not in redact_log(body)


def test_request_hashes_are_stable_per_salt():
    """One salt, one name; another salt, another name; the id cannot be read from it."""
    assert hash_request_id("r1", salt="a") == hash_request_id("r1", salt="a")
    assert hash_request_id("r1", salt="a") != hash_request_id("r1", salt="b")
    assert "r1" not in hash_request_id("r1").removeprefix("req-")


@settings(deadline=None)  # a loaded machine is no failure
@given(st.text(max_size=300))
def test_redaction_never_raises(text):
    """Any text at all, lone surrogates included, comes back as text."""
    assert isinstance(redact_log(text), str)
    assert isinstance(hash_request_id(text), str)


@pytest.mark.parametrize(
    "unit", ["a_", "a", "-", "token", "'", "[", "token=[", "a://", "prompt:", "api_", '"\\', "=: "]
)
def test_hostile_lines_cost_linear_time(unit):
    """8 KiB made to defeat a pattern are done in well under a second."""
    began = time.perf_counter()
    redact_log(unit * (8192 // len(unit)))
    assert time.perf_counter() - began < 0.5


SECRETS = "s3cr3t-Value-77"


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[32mapi_key\x1b[0m=\x1b[1m{}\x1b[0m",
        "api_\x1b[0mkey\x1b[0m={}",
        "api\x00_key={}",
        "api_\u200bkey={}",
        "\x9b1mtoken\x9b0m: {}",
        "\x1b]8;;http://x\x1b\\api_key\x1b]8;;\x1b\\={}",
        "Cookie: session={}; theme=dark",
        'Set-Cookie: a="b"; session="{}"; Path=/',
        "curl -b x -H 'Cookie: a=\"b\"; c={}' http://x",
        "headers=[(b'host', b'x'), (b'cookie', b'c={}')]",
        "headers=[(b'x-api-key', b'{}')]",
        "headers=[(b'authorization', b'Basic {}')]",
        'Authorization: Digest username="x", response="{}"',
        '{{"Cookie": "c={}"}}',
        "X-Api-Key '{}'",
        "X-Api-Key {}",
        "The API key is {}",
        "API key is '{}'",
        "API key: {}",
        "api key = {}",
        "API key:  hunter-{}",
        '{{\\"api_key\\": \\"{}\\"}}',
        "the password is {} now",
        "auth token was set to {}",
        "-k {}",
        "vllm-client -k '{}' --port 80",
        "['client', '-k', '{}']",
        "--auth user:{}",
        "--auth=user:{}",
        "--proxy-user 'me:{}'",
        "curl -u me:{} http://x",
        "['curl', '-u', 'me:{}']",
        "-----BEGIN PRIVATE KEY-----\\n{}\\n-----END PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY----- {}",
    ],
)
def test_every_way_to_show_a_secret_is_known(line):
    """Coloured, in a cookie, in prose, in a short flag, in a PEM block: the value is gone."""
    out = redact(line.format(SECRETS))
    assert SECRETS not in out
    assert MASK in out


@pytest.mark.parametrize(
    "text",
    [
        "API key is invalid, the token is missing; password is required",
        "the next token is 128009, a token is generated every 20 ms",
        "curl -k https://host/x; pytest -k name; head -k ./file",
        "docker run -u 1000:1000 --user 0:0 -k 100000000",
        "cookies and authors: authorization works",
        "python -u http://x --author me",
        "-----BEGIN CERTIFICATE----- MIIB",
        "tab\tand\nline end",
    ],
)
def test_what_only_sounds_like_a_secret_stays(text):
    """Statements about keys, users of the system, addresses and certificates are unchanged."""
    assert redact(text) == text


BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
PEM = ["-----BEGIN PRIVATE KEY-----", BODY, BODY, "MzEfYyjiWA4R4==", "-----END PRIVATE KEY-----"]


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("last", range(2, 6))
@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) "])
def test_a_private_key_over_several_lines_is_gone(first, last, prefix):
    """Whole or in part, bare or behind a prefix; the lines around it are as they were."""
    around = ["before", "INFO /usr/lib/x 200"] if first == 0 else []
    lines = [*around, *(prefix + line for line in PEM[first:last])]
    shown = "\n".join(out := redact_lines(lines))
    assert BODY not in shown
    assert len(out) == len(lines)
    assert out[: len(around)] == around
    if first == 0 or last == 5:
        assert "MzEfYyjiWA4R4" not in shown


def test_after_a_private_key_lines_are_shown_again():
    """A block ends with its END; hashes and words are no part of any."""
    after = ["sha256 " + "ab" * 32, "loaded /models/abcdefghijklmnopqrstuvwxyz/config.json"]
    assert redact_lines([*PEM, *after])[-2:] == after


def test_short_flags_with_secrets_in_a_command():
    """-k SECRET and -u user:pass as items of their own."""
    argv = ["client", "-k", SECRETS, "-u", f"me:{SECRETS}", "--auth", f"me:{SECRETS}", "-k", "12"]
    assert redact_argv(argv) == ("client", "-k", MASK, "-u", MASK, "--auth", MASK, "-k", "12")


KNOWN = [
    (["vllm", "--api-key", "plainwords"], {}),
    (["vllm", "--api-key=plainwords"], {}),
    (["vllm", "--api-key", "other", "plainwords", "--port", "80"], {}),
    (["vllm", "--api-keys", "--api-key", '["x", "plainwords"]'], {}),
    (["sh", "-c", "vllm serve m --api-key plainwords --port 80"], {}),
    (["env", "API_KEY=plainwords", "vllm"], {}),
    (["client", "-u", "me:plainwords"], {}),
    ([], {"MY_API_KEY": "plainwords"}),
    ([], {"HF_TOKEN": " plainwords\n"}),
    ([], {"DATABASE_URL": "postgres://me:plainwords@db/x"}),
]


@pytest.mark.parametrize(("command", "env"), KNOWN)
def test_a_known_secret_is_gone_wherever_it_stands(command, env):
    """What the engine was given as a secret has no name beside it when the engine prints it."""
    one = Redactor.of(command, env)
    for text in (
        "using plainwords now",
        "xplainwordsx",
        "pl\x1b[1mainwords",
        "a plainwor",
        "ainwords b",
    ):
        out = one.redact(text)
        assert MASK in out, text
        assert not any(part in out for part in ("plain", "words")), text
    assert one.redact_log("using plainwords now") == f"using {MASK} now"
    assert one.redact_lines(["plainwords"]) == [MASK]
    assert one.redact_argv(["x", "plainwords"]) == ("x", MASK)
    assert one.redact_env({"X": "plainwords"}) == {"X": MASK}
    assert one.redact_all({"plainwords": ["plainwords", 1, {"a": "b"}]}) == {
        MASK: [MASK, 1, {"a": "b"}]
    }


def test_a_known_secret_is_found_in_its_other_forms():
    """In an address and in JSON a secret is written differently; a key has several lines."""
    one = Redactor(['a"b/c d+e', "-----BEGIN PRIVATE KEY-----\nfirstline\nsecondline\n"])
    assert one.redact("?q=a%22b%2Fc%20d%2Be&x") == f"?q={MASK}&x"
    assert one.redact('{"q": "a\\"b/c d+e"}') == f'{{"q": "{MASK}"}}'
    assert one.redact("then secondline") == f"then {MASK}"


@pytest.mark.parametrize(
    "value", ["short", "/etc/ssl/key.pem", "./a/b/key", "123456789", "1e-10000", "True", "disabled"]
)
def test_what_could_be_an_ordinary_word_is_not_searched_for(value):
    """Short values, paths, numbers and booleans would be cut out of text that says nothing."""
    assert Redactor.of([], {"API_KEY": value}).redact(f"x {value} y") == f"x {value} y"


@pytest.mark.parametrize(
    "unit", ["\x1b]", "\x1b[", "token is ", "cookie: '", "-u a", "-k ", "API key "]
)
def test_hostile_tails_cost_linear_time(unit):
    """The newer patterns as well: 8 KiB in well under a second."""
    began = time.perf_counter()
    Redactor([f"known-{i}-value" for i in range(50)]).redact_log(unit * (8192 // len(unit)))
    redact_log("-----BEGIN PRIVATE KEY-----" * 300)
    assert time.perf_counter() - began < 0.5
