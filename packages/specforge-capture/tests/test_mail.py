import threading

import pytest
import torch.distributed as dist

from specforge_capture.mail import Mailbox, StreamFailed, announce_failure


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_messages_come_once_and_in_order(store: dist.Store) -> None:
    sender, reader, other = Mailbox(store, "a"), Mailbox(store, "a"), Mailbox(store, "b")
    assert reader.receive() is None
    for number in range(3):
        sender.send({"n": number})
    assert [reader.receive() for _ in range(4)] == [{"n": 0}, {"n": 1}, {"n": 2}, None]
    assert other.receive() is None


def test_any_thread_may_send(store: dist.Store) -> None:
    sender, reader = Mailbox(store, "a"), Mailbox(store, "a")
    threads = [threading.Thread(target=sender.send, args=({"n": number},)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    received = [reader.receive() for _ in range(20)]
    assert sorted(message["n"] for message in received if message) == list(range(20))


def test_a_failure_reaches_every_reader_before_older_messages(store: dist.Store) -> None:
    boxes = [Mailbox(store, name) for name in "ab"]
    boxes[0].send({"n": 0})
    announce_failure(store, "ValueError: größer")
    for box in boxes:
        with pytest.raises(StreamFailed, match="ValueError: größer"):
            box.receive()
