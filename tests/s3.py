"""A real S3 server (moto's) for the tests, which can fail to answer."""
import contextlib
import os

import pytest

for module in "s3fs", "upath", "moto.server", "boto3":
    pytest.importorskip(module, reason="pip install universal_pathlib s3fs boto3 'moto[server]'")

import boto3  # noqa: E402
import moto.server  # noqa: E402
import s3fs  # noqa: E402

KEYS = dict(AWS_ACCESS_KEY_ID="AKIATESTTESTTESTTEST", AWS_SECRET_ACCESS_KEY="verysecret" * 4)
ENV = KEYS | dict(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="none", no_proxy="*",
                  AWS_SHARED_CREDENTIALS_FILE="none", MOTO_S3_DEFAULT_MAX_KEYS="10")    # S3's pages: 1000

class Server:
    """faults: what happens to the next requests, "" (nothing), "gone", "short" (half an answer)."""
    def __init__(self):
        server = moto.server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        self.app, server._server.app = server._server.app, self
        self.url, self.stop = "http://{}:{}".format(*server.get_host_and_port()), server.stop
        self.faults, self.waits = iter(()), False

    def __call__(self, request, start):
        self.waits |= "HTTP_EXPECT" in request          # for "100 Continue", which may be without end
        fault = next(self.faults, "")
        if fault != "gone":
            answer = b"".join(self.app(request, start))
            yield answer[:len(answer) // 2] if fault else answer
        if fault:
            os.close(request["werkzeug.socket"].detach())

@contextlib.contextmanager
def server():
    """A Server that the environment leads to."""
    with pytest.MonkeyPatch.context() as patch:
        for key in [k for k in os.environ if k.startswith("AWS_")]:
            patch.delenv(key)
        server = Server()
        for key, value in (ENV | dict(AWS_ENDPOINT_URL=server.url)).items():
            patch.setenv(key, value)
        yield server
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()

def bucket(request):
    """boto3's view of a test's own bucket: another program that works in the store. `at`: its URL."""
    name = f"b{abs(hash(request.node.name))}"
    bucket = boto3.resource("s3", region_name="us-east-1").create_bucket(Bucket=name)
    bucket.at = f"s3://{name}"
    return bucket
