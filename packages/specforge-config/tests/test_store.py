import pytest

from specforge_config.store import FileStore, MooncakeStore, parse_store


def test_settings_pass_through_json() -> None:
    for store in (
        MooncakeStore(master="node-0:50051", local_hostname="10.0.0.2", protocol="rdma", devices="mlx5_0"),
        FileStore(kind="files", folder="outputs/store", capacity_bytes=10),
    ):
        assert parse_store(store.model_dump_json()) == store
    assert parse_store("{}") == MooncakeStore()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("not json", "the text: Invalid JSON"),
        ('{"kind": "redis"}', "the text: .*'redis'.* 'mooncake', 'files'"),
        ('{"kind": "files"}', r"files\.folder: Field required"),
        ('{"kind": "files", "folder": "x", "capacity_bytes": 0}', r"files\.capacity_bytes: .*greater than 0"),
        ('{"master": "nowhere"}', "master is 'nowhere'; required: host:port"),
        ('{"devices": "mlx5_0"}', "devices is 'mlx5_0', protocol is tcp; required: drop devices"),
        ('{"folder": "x"}', r"mooncake\.folder: Extra inputs are not permitted"),
    ],
)
def test_wrong_settings_are_named(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_store(text)
