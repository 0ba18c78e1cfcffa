"""A bucket of moto's S3 server in a process of its own, which answers as late as is asked for."""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "team", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def bucket(name: str, delay_ms: float) -> Iterator[str]:
    """The URL of an empty bucket; what leads to it is in the environment."""
    import s3fs

    command = [sys.executable, __file__, "--delay-ms", str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            os.environ |= {**_CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}"}
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
            yield f"s3://{name}"
        finally:
            server.kill()


def main() -> None:
    """Serve until the process is killed; the port is the first line of what is written."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    seconds = parser.parse_args().delay_ms / 1000
    application = DomainDispatcherApplication(create_backend_app)

    def late(*request: object) -> object:
        time.sleep(seconds)
        return application(*request)

    server = make_server("127.0.0.1", 0, late, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
