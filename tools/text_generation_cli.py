#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Asks a text generation server to continue prompts, one after the other.

    python tools/text_generation_cli.py localhost:5000

The server is tools/run_text_generation_server.py, or another that answers Megatron's PUT /api. Ends
at the end of the input, and at Ctrl-C. --api-key, or the environment variable MEGATRON_API_KEY, is
the key of a server that wants one.
"""

import contextlib
import http.client
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from megatron.config.command_line import CommandParser
from megatron.util.errors import one_line

PATH = "/api"
SHOWN = 300
"""Characters of an answer that is neither a text nor a message."""


class ServerError(Exception):
    """No answer came; the message names the server, what happened, and what to do."""


@dataclass(frozen=True)
class Address:
    """Address of a server. ``path`` comes before :data:`PATH`."""

    host: str
    port: int | None
    secure: bool = False
    path: str = ""

    @classmethod
    def of(cls, text: str) -> "Address":
        """From HOST:PORT, or a whole URL. Raises ValueError if it is neither."""
        url = urlsplit(text if "://" in text else f"http://{text}")
        whole = url.scheme in ("http", "https") and url.hostname and not (url.query or url.fragment)
        try:
            port = url.port
        except ValueError:
            whole = False
        if not whole or any(character.isspace() for character in text):
            raise ValueError(f"{text!r} is not the address of a server: HOST:PORT")
        path = url.path.rstrip("/").removesuffix(PATH)
        return cls(url.hostname or "", port, url.scheme == "https", path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and talks to the server."""
    parser = CommandParser(__doc__)
    parser.add_argument("server", metavar="HOST:PORT", help="address of the server")
    parser.add_argument(
        "--api-key", default=os.environ.get("MEGATRON_API_KEY"), help="key of the server"
    )
    options = parser.parse_args(argv)
    try:
        address = Address.of(options.server)
    except ValueError as error:
        parser.error(str(error))
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # the keys that edit a line
    try:
        converse(address, options.api_key)
    except ServerError as error:
        sys.exit(f"{parser.prog}: error: {one_line(error)}")
    except EOFError:
        print()
    except KeyboardInterrupt:
        print()
        sys.exit(130)


def converse(address: Address, key: str | None) -> None:
    """Asks for prompts until the input ends (EOFError), or no answer comes (ServerError)."""
    while True:
        prompt = input("Enter prompt: ")
        count = tokens_wanted()
        print(shown(*put(address, {"prompts": [prompt], "tokens_to_generate": count}, key)))


def shown(status: int, content: str) -> str:
    """Return what to print of an answer: the text, or else the server's message."""
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    match answer:
        case {"text": [str(text), *_]} if status == http.client.OK:
            return f"Megatron Response: \n{text}"
        case {"message": str(message)}:
            return f"Error {status}: {message}"
    return f"Error {status}: {content[:SHOWN]}"


def tokens_wanted() -> int:
    """Asks until the answer is a number; which ones are allowed, the server says."""
    while True:
        text = input("Enter number of tokens to generate: ")
        try:
            return int(text)
        except ValueError:
            print(f"{text!r} is not a whole number")


def put(address: Address, request: object, key: str | None) -> tuple[int, str]:
    """The status of a request and the content of its answer. Raises ServerError if the server does
    not answer."""
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    # Between connecting and the answer, a model may work for any time.
    connection = kind(address.host, address.port)
    try:
        connection.request("PUT", address.path + PATH, json.dumps(request), headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except ConnectionRefusedError:
        raise ServerError(
            f"nothing listens at {address}; start tools/run_text_generation_server.py, or correct "
            "the address"
        ) from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        what = str(error) or type(error).__name__
        raise ServerError(f"{address} gives no answer to PUT {PATH}: {what}") from None
    finally:
        connection.close()


if __name__ == "__main__":
    main()
