"""Where captured features wait between a capture server and the trainer: a union over stores.

A server is given these settings as JSON, on its command line.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, Tag, TypeAdapter, ValidationError

from specforge_config.base import Config, host_and_port, tagged


class MooncakeStore(Config):
    """Memory of the capture servers' hosts, shared over the network by Mooncake."""

    kind: Literal["mooncake"] = "mooncake"
    """Discriminator."""
    master: str = "127.0.0.1:50051"
    """`host:port` of the Mooncake master, which knows where objects lie."""
    local_hostname: str = Field("127.0.0.1", min_length=1)
    """Address at which the other processes reach this one."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes travel."""
    devices: str = ""
    """RDMA devices, separated by commas."""
    capacity_bytes: PositiveInt = 4 << 30
    """Memory that each capture server (or store process) gives to the store; trainer ranks give none."""
    lease_seconds: PositiveFloat = 60.0
    """How long an object that is being read is kept from eviction: longer than its transfer takes."""
    transfer_timeout_seconds: PositiveFloat = 60.0
    """How long one transfer may take. 5 GiB over TCP have taken minutes."""

    def _faults(self) -> Iterator[str]:
        try:
            host_and_port(self.master)
        except ValueError as error:
            yield f"master is {error}"
        if self.protocol == "tcp" and self.devices:
            yield f"devices is {self.devices!r}, protocol is tcp; required: drop devices, or protocol rdma"


class FileStore(Config):
    """A folder that servers and trainer ranks all see."""

    kind: Literal["files"]
    """Discriminator."""
    folder: str = Field(min_length=1)
    """The folder, relative to the working directory."""
    capacity_bytes: PositiveInt | None = None
    """Bytes that the folder may hold; default: what the disk does."""


StoreConfig = Annotated[
    Annotated[MooncakeStore, Tag("mooncake")] | Annotated[FileStore, Tag("files")], tagged("kind", "mooncake")
]
"""Where captured features wait."""


def parse_store(text: str) -> MooncakeStore | FileStore:
    """The store settings that a JSON text holds.

    Raises:
        ValueError: naming each setting that is wrong.
    """
    try:
        return TypeAdapter(StoreConfig).validate_json(text, strict=True)
    except ValidationError as error:
        rows = (f"{'.'.join(map(str, row['loc'])) or 'the text'}: {row['msg']}" for row in error.errors())
        raise ValueError(f"store settings {text!r}: " + "; ".join(rows)) from None
