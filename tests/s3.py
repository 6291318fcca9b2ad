"""A real S3 server (moto's) for the tests."""
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

@contextlib.contextmanager
def server():
    """moto's; the environment leads to it."""
    with pytest.MonkeyPatch.context() as patch:
        for key in [k for k in os.environ if k.startswith("AWS_")]:
            patch.delenv(key)
        server = moto.server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        url = "http://{}:{}".format(*server.get_host_and_port())
        for key, value in (ENV | dict(AWS_ENDPOINT_URL=url)).items():
            patch.setenv(key, value)
        yield
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()

def bucket(request):
    """boto3's view of a test's own bucket: another program that works in the store. `at`: its URL."""
    name = f"b{abs(hash(request.node.name))}"
    bucket = boto3.resource("s3", region_name="us-east-1").create_bucket(Bucket=name)
    bucket.at = f"s3://{name}"
    return bucket
