"""`dltta node`, typed wrongly: one line, exit code 2, before anything is received."""

import socket

import pytest

pytest.importorskip("pynetdicom", reason="a DICOM node needs pynetdicom: pip install 'dltta[dicom]'")

import commands
import streams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return streams.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """What `dltta node` says, in one line."""

    def run(*arguments, output=tmp_path / "state"):
        code, out, err = commands.typed(monkeypatch, capsys, "node", "-o", output, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        return " ".join(err.split())

    return run


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--ae", "A" * 17), "'AAAAAAAAAAAAAAAAA' is no application entity title"),
        (("--ae", " "), "is no application entity title"),
        (("--ae", "A\\B"), "is no application entity title"),
        (("--peer", "@10.0.0.7"), "'' is no application entity title"),
        (("--port", "70000"), "--port must be from 0 to 65535, got 70000"),
        (("--to", "ARCHIVE"), "'ARCHIVE' is no destination; write AET@HOST:PORT"),
        (("--to", "http://host:port/dicom-web"), "is no destination"),
        (("--host", "0.0.0.0"), "name who may send: --peer AET@HOST"),
        (("--tls-cert", "a.pem"), "--tls-cert and --tls-key go together"),
        (("--tls-ca", "a.pem"), "--tls-ca with both"),
        (("--tls-cert", "a.pem", "--tls-key", "a.key"), "the certificate cannot be used"),
        (("--service", "http://127.0.0.1:1"), "give a model (-m MODEL) or a running service (--service URL), one"),
        (("--quiet", "-1"), "--quiet must be at least 0"),
    ],
)
def test_options_that_cannot_be_used_are_named(refused, model, options, says):
    assert says in refused("-m", model, *options)


def test_a_node_needs_a_model_or_a_service(refused):
    assert "give a model (-m MODEL) or a running service" in refused()


def test_a_port_in_use_is_said(refused, model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another" in refused(
            "-m", model, "--port", port
        )


def test_a_state_folder_that_cannot_be_written_is_said(refused, model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in refused("-m", model, "--port", 0, output=tmp_path / "file" / "state")


def test_a_model_that_is_not_there_is_said(refused, tmp_path):
    assert "gone is not a model" in refused("-m", tmp_path / "gone")
