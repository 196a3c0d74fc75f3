"""Who may do what, without a server."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.control.auth import (
    Access,
    Auth,
    binds_loopback_only,
    clean_token,
    is_loopback,
    load_token,
    split_address,
)
from stallwatch.errors import ConfigError

TOKEN = "0123456789abcdef"


class TestToken:
    def test_file_beats_variable(self, tmp_path):
        """A token file that is named wins over the environment."""
        file = tmp_path / "token"
        file.write_text("file-file-file-file\n")
        file.chmod(0o600)

        assert load_token(str(file), {"STALLWATCH_TOKEN": TOKEN}) == "file-file-file-file"
        assert load_token(None, {"STALLWATCH_TOKEN": TOKEN}) == TOKEN
        assert load_token(None, {}) is None

    @pytest.mark.parametrize(
        "bad", ["short", "two words of a token", "tökentökentökentöken", "a\nb" * 9]
    )
    def test_bad_tokens_are_refused(self, bad):
        """A token that is short, not ASCII or not one word is a configuration error."""
        with pytest.raises(ConfigError, match="token"):
            clean_token(bad, where="x")

    def test_unreadable_file_names_the_file(self, tmp_path):
        """A missing token file is named in the error."""
        with pytest.raises(ConfigError, match="nothere"):
            load_token(str(tmp_path / "nothere"))

    @pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602])
    def test_a_file_that_others_can_read_is_refused(self, tmp_path, mode):
        """Whoever has the token may restart engines: 78, the mend, the token unsaid; 0600 is good."""
        file = tmp_path / "token"
        file.write_text(TOKEN)
        file.chmod(mode)

        with pytest.raises(ConfigError, match="lets others at it") as found:
            load_token(str(file))
        assert found.value.exit_code == 78
        assert "chmod 600" in found.value.hint
        assert TOKEN not in str(found.value)
        file.chmod(0o600)
        assert load_token(str(file)) == TOKEN

    def test_a_pipe_of_the_shell_is_read(self):
        """`--token-file <(pass show stallwatch)`: nobody else can open it."""
        read, write = os.pipe()
        os.write(write, TOKEN.encode())
        os.close(write)

        assert load_token(f"/dev/fd/{read}") == TOKEN
        os.close(read)

    def test_huge_file_is_refused(self, tmp_path):
        """A token file is never read beyond 4 KiB."""
        (tmp_path / "t").write_text("x" * 5000)

        with pytest.raises(ConfigError, match="4 KiB"):
            load_token(str(tmp_path / "t"))

    @pytest.mark.parametrize(
        "header", [None, "", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ", "Bearer ü"]
    )
    def test_wrong_headers_do_not_match(self, header):
        """Only the exact token in a Bearer header matches."""
        assert not Auth(TOKEN).token_matches(header)
        assert not Auth(None).token_matches(header)

    def test_right_header_matches(self):
        """The scheme's case does not matter, the token's does."""
        assert Auth(TOKEN).token_matches(f"bearer {TOKEN}")
        assert not Auth(TOKEN).token_matches(f"bearer {TOKEN.upper()}")

    def test_no_token_in_repr(self):
        """The token cannot reach a log through repr()."""
        assert TOKEN not in repr(Auth(TOKEN))


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("127.0.0.1:9470", ("127.0.0.1", 9470)),
            ("[::1]:80", ("::1", 80)),
            ("[::1]", ("::1", 9470)),
            ("::1", ("::1", 9470)),
            (":9470", ("0.0.0.0", 9470)),
            ("localhost", ("localhost", 9470)),
        ],
    )
    def test_forms(self, text, found):
        """All usual forms of an address are understood."""
        assert split_address(text) == found

    @pytest.mark.parametrize("text", ["a:b", "a:99999", "[::1", "[::1]80", "a:-1", "a:"])
    def test_bad_forms(self, text):
        """What is no address is a configuration error."""
        with pytest.raises(ConfigError):
            split_address(text)

    @pytest.mark.parametrize("control", ["0.0.0.0:9470", ":9470", "[::]:9470", "192.0.2.1:9470"])
    def test_open_address_needs_a_token(self, control):
        """An address that other machines reach is refused without a token and taken with one."""
        with pytest.raises(ConfigError, match="no token"):
            Auth.for_address(control)
        assert Auth.for_address(control, token=TOKEN).token == TOKEN

    def test_no_address_needs_nothing(self):
        """control = "" listens on the socket only, and needs no token."""
        assert Auth.for_address("").token is None

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_loopback_binds(self, host):
        """Loopback names and addresses need no token."""
        assert binds_loopback_only(host)

    @pytest.mark.parametrize(
        ("peer", "so"),
        [
            ("::ffff:127.0.0.1", True),
            ("127.0.0.1", True),
            ("::1", True),
            ("::ffff:10.0.0.1", False),
            ("10.0.0.1", False),
            ("localhost", False),
            ("", False),
            ("fe80::1%lo", False),
        ],
    )
    def test_loopback_peers(self, peer, so):
        """A mapped loopback address is one; a name never is."""
        assert is_loopback(peer) is so


class TestHost:
    @pytest.mark.parametrize(
        "header", ["localhost", "localhost:1", "127.0.0.1:9470", "[::1]:9470", "LOCALHOST:9470"]
    )
    def test_own_names(self, header):
        """Our own names are allowed with any port: a forwarded port keeps working."""
        assert Auth.for_address("127.0.0.1:9470").host_allowed(header)

    @pytest.mark.parametrize(
        "header",
        [
            None,
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.nip.io",
            "10.0.0.1",
            "[::2]",
            "localhost@evil",
            "a:b:c",
            "[",
            "localhost:80:80",
        ],
    )
    def test_foreign_names(self, header):
        """Any other name is refused, look-alikes included."""
        assert not Auth.for_address("127.0.0.1:9470").host_allowed(header)

    def test_wildcard_takes_addresses_but_no_names(self):
        """Bound to everything, address literals are ours; a name can still be a rebound one."""
        auth = Auth.for_address("0.0.0.0:9470", token=TOKEN)

        assert auth.host_allowed("10.0.0.7:9470")
        assert not auth.host_allowed("evil.example:9470")

    @given(st.text(max_size=60))
    def test_random_hosts_never_get_in(self, header):
        """No random header is allowed unless it spells one of our names."""
        if Auth().host_allowed(header):
            assert any(name in header.lower() for name in Auth().hosts)


class TestAccess:
    @pytest.mark.parametrize(
        ("unix", "peer", "header", "found"),
        [
            (True, None, None, Access.FULL),
            (False, None, None, Access.NONE),
            (False, "127.0.0.1", None, Access.READ),
            (False, "10.0.0.1", None, Access.NONE),
            (False, "10.0.0.1", f"Bearer {TOKEN}", Access.FULL),
            (False, "127.0.0.1", "Bearer wrong-wrong-wrong", Access.READ),
        ],
    )
    def test_table(self, unix, peer, header, found):
        """Socket or token: all; loopback: reads; a TCP peer without an address: nothing."""
        assert Auth(TOKEN).access(unix=unix, peer=peer, authorization=header) is found
