"""Who may ask a server: bearer tokens, TLS and mutual TLS, and what is said to those who may not."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from dflash_jax import Engine, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.tokenizer import Tokenizer
from serve import client
from serve.__main__ import main
from serve.auth import channel_credentials, read_tokens, server_credentials
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.server import Server
from tests.models import random_target
from tests.servers import serving

SERVICE = pb.DESCRIPTOR.services_by_name["DFlash"]
METHODS = dict(SERVICE.methods_by_name)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
TOKENIZE = pb.TokenizeRequest(input=pb.Input(tokens=pb.TokenIds(ids=[5, 6])))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_target(), None, Tokenizer.from_folder(BUNDLED_TARGET), max_slots=1, max_model_len=64)


def code_of(call: Callable[[], object]) -> grpc.StatusCode | None:
    """None where it is answered."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return None


def whole(answer: object) -> object:
    """What a stream holds; else the answer itself."""
    return list(answer) if isinstance(answer, Iterator) else answer


def test_no_token_no_answer(engine: Engine) -> None:
    with serving(engine, tokens=["first", "second"]) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.DFlashStub(channel)
        refused = [
            [], [("authorization", "first")], [("authorization", "Bearer third")], [("authorization", "Bearer ")],
            [("authorization", "Basic first")], [("authorization", "Bearer first second")], [("x-token", "first")],
            [("authorization", "Bearer third"), ("authorization", "Bearer first")],
        ]  # fmt: skip
        generate = pb.GenerateRequest(input=TOKENIZE.input)
        described = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        for metadata in refused:
            assert code_of(lambda m=metadata: list(stub.Generate(generate, metadata=m))) == UNAUTHENTICATED
            for name, one in METHODS.items():
                # Not even whether the message is one; nor what there is beside the service.
                for raw in (b"", b"\xff\xff"):
                    kind = channel.unary_stream if one.server_streaming else channel.unary_unary
                    call = kind(f"/{SERVICE.full_name}/{name}", request_serializer=bytes)
                    assert code_of(lambda m=metadata, c=call, r=raw: whole(c(r, metadata=m))) == UNAUTHENTICATED
            assert code_of(lambda m=metadata: list(described(iter([asked]), metadata=m))) == UNAUTHENTICATED
        for token in ("Bearer first", "bearer second"):
            assert stub.Tokenize(TOKENIZE, metadata=[("authorization", token)]).token_ids == [5, 6]
        database = ProtoReflectionDescriptorDatabase(channel)
        assert code_of(database.get_services) == UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# the team\n\n  abc  \ndef-1\n")
    assert read_tokens(path) == ["abc", "def-1"]
    for text, words in (("#x\n", "has no token"), ("a b\n", "printable ASCII"), ("\u00e4\n", "printable ASCII")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=words):
            read_tokens(path)
    with pytest.raises(UserError, match=r"--token-file .*: cannot be read"):
        read_tokens(tmp_path / "none")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (ca), and a server's and a client's certificate signed by it; a stranger's is signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes the certificates")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    fresh = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *fresh, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *fresh[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder


def tokenize(port: int, folder: Path, ca: str, shown: str | None = None) -> list[int]:
    pair = (None, None) if shown is None else (folder / f"{shown}.pem", folder / f"{shown}.key")
    with grpc.secure_channel(f"127.0.0.1:{port}", channel_credentials(folder / f"{ca}.pem", *pair)) as channel:
        return list(pb_grpc.DFlashStub(channel).Tokenize(TOKENIZE, timeout=10).token_ids)


def test_tls(engine: Engine, certificates: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = server_credentials(certificates / "server.pem", certificates / "server.key", None)
    with serving(engine, credentials=shown, tokens=["abc"]) as port:
        refused = code_of(lambda: tokenize(port, certificates, "ca"))
        assert refused == UNAUTHENTICATED  # the connection is good, the token is missing
        assert code_of(lambda: tokenize(port, certificates, "stranger")) == grpc.StatusCode.UNAVAILABLE
        (tmp_path / "tokens").write_text("abc\n")
        words = ["--address", f"127.0.0.1:{port}", "--timeout", "10", "--info"]
        words += ["--tls-ca", str(certificates / "ca.pem")]
        assert client.main([*words, "--token-file", str(tmp_path / "tokens")]) == 0
        assert "max_model_len: 64" in capsys.readouterr().out
        assert client.main(words) == 1
        assert "UNAUTHENTICATED" in capsys.readouterr().err
        with grpc.insecure_channel(f"127.0.0.1:{port}") as plain:
            stub = pb_grpc.DFlashStub(plain)
            assert code_of(lambda: stub.Tokenize(TOKENIZE, timeout=10)) == grpc.StatusCode.UNAVAILABLE


def test_mutual_tls(engine: Engine, certificates: Path) -> None:
    pair = (certificates / "server.pem", certificates / "server.key")
    with serving(engine, credentials=server_credentials(*pair, certificates / "ca.pem")) as port:
        assert tokenize(port, certificates, "ca", "client") == [5, 6]
        for shown in (None, "stranger"):
            assert code_of(lambda s=shown: tokenize(port, certificates, "ca", s)) == grpc.StatusCode.UNAVAILABLE


def test_http_has_the_same_connection(engine: Engine, certificates: Path) -> None:
    """TLS with a certificate that the client must show, on the second port too; never plain text beside it."""
    files = (certificates / "server.pem", certificates / "server.key", certificates / "ca.pem")

    async def run() -> None:
        server = Server(
            engine, "127.0.0.1", 0, max_queue=1, warm_up="none", credentials=server_credentials(*files),
            http_port=0, http_tls=files,
        )  # fmt: skip
        await server.start()
        assert server.http is not None
        address = f"127.0.0.1:{server.http.port}/health"

        async def ask(url: str, shown: str | None = None) -> int:
            context = ssl.create_default_context(cafile=certificates / "ca.pem")
            if shown is not None:
                context.load_cert_chain(certificates / f"{shown}.pem", certificates / f"{shown}.key")
            async with httpx2.AsyncClient(verify=context) as client:
                return (await client.get(url)).status_code

        assert await ask(f"https://{address}", "client") == 200
        for scheme, shown in (("https", None), ("https", "stranger"), ("http", None)):
            with pytest.raises(httpx2.TransportError):
                await ask(f"{scheme}://{address}", shown)
        await server.stop(1)
        with pytest.raises(UserError, match="--tls-cert, --tls-key or --tls-client-ca cannot be used"):
            Server(engine, "127.0.0.1", 0, 1, http_port=0, http_tls=(files[0], certificates / "ca.key", None))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_flags_that_cannot_be_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = tmp_path / "a.pem"
    here.write_text("x")
    cases = (
        (main, ["--tls-cert", str(here)], "--tls-cert and --tls-key go together"),
        (main, ["--tls-client-ca", str(here)], "--tls-client-ca needs both"),
        (main, ["--tls-cert", str(here), "--tls-key", str(tmp_path / "none")], "--tls-key "),
        (main, ["--token-file", str(tmp_path / "none")], "--token-file "),
        (client.main, ["--tls-cert", str(here), "--tls-key", str(here), "hello"], "need --tls-ca"),
        (client.main, ["--tls-ca", str(tmp_path / "none"), "hello"], "--tls-ca "),
    )
    for command, words, said in cases:
        assert command(words) == 2
        err = capsys.readouterr().err
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and said in lines[0]
