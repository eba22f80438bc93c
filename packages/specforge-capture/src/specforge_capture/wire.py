"""What a producer and a capture server say to each other: HTTP with JSON, on SGLang's own `/generate`.

A request carries tokens and where the features shall go; its answer comes once every piece is readable and
carries a ref, never states. Failures are told as `http_client` reads them. `GET /server_info` tells, under
`spec_capture`, what the server captures, so that a producer can check the contract before the first prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerClient
from specforge_capture.refs import FeatureRef
from specforge_config.features import CaptureSpec, spec_hash

FIELD = "spec_capture"
"""Name under which requests, answers and server descriptions hold what is ours."""


@dataclass(frozen=True)
class CaptureRequest:
    """One sample to capture."""

    key: str
    """Prefix of its objects in the store, and the request's id."""
    sample_id: str
    """Identity of the sample."""
    input_ids: tuple[int, ...]
    """Its tokens."""
    spec_hash: str
    """`spec_hash` of the contract that the features must follow."""

    def to_json(self) -> dict[str, Any]:
        """The body of `POST /generate`. The key is the extra key too: a prefix that another request left in
        the server's cache would not be captured again."""
        parameters = {"key": self.key, "sample_id": self.sample_id, "spec_hash": self.spec_hash}
        return {
            "rid": self.key,
            "input_ids": list(self.input_ids),
            "sampling_params": {"max_new_tokens": 0, "custom_params": {FIELD: parameters}},
            "extra_key": self.key,
        }

    @classmethod
    def from_json(cls, body: Any) -> CaptureRequest:
        """Read the body of a request.

        Raises:
            ValueError: if it is malformed.
        """
        try:
            parameters = body["sampling_params"]["custom_params"][FIELD]
            ids = tuple(body["input_ids"])
            texts = [parameters[name] for name in ("key", "sample_id", "spec_hash")]
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed capture request: {type(error).__name__}: {error}") from None
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"malformed capture request: {FIELD} is {parameters!r:.200}; required: strings")
        if not ids or any(type(token) is not int or token < 0 for token in ids):
            raise ValueError(f"capture request {texts[0]!r}: input_ids must be a list of token ids")
        return cls(key=texts[0], sample_id=texts[1], input_ids=ids, spec_hash=texts[2])


@dataclass(frozen=True)
class ServerDescription:
    """What a server captures."""

    layer_ids: tuple[int, ...]
    final_state: bool
    spec_hash: str
    method: str

    @classmethod
    def of(cls, spec: CaptureSpec) -> ServerDescription:
        """The description of a server that captures under `spec`."""
        return cls(spec.layer_ids, spec.final_state, spec_hash(spec), spec.method)

    def to_json(self) -> dict[str, Any]:
        """What stands under `spec_capture` in a server's information."""
        return {**asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, information: Any) -> ServerDescription:
        """Read a server's information.

        Raises:
            ValueError: if the server captures nothing.
        """
        try:
            found = information[FIELD]
            names = ("final_state", "spec_hash", "method")
            return cls(tuple(found["layer_ids"]), *(found[name] for name in names))
        except (KeyError, TypeError):
            raise ValueError(
                f"its information is {information!r:.200}; required: {FIELD}, which a server started for "
                "capture tells"
            ) from None

    def require(self, spec: CaptureSpec) -> None:
        """Check that the server captures under `spec`.

        Raises:
            ValueError: naming what differs.
        """
        mine = asdict(ServerDescription.of(spec))
        if wrong := [
            f"{name} is {v!r}, required {mine[name]!r}" for name, v in asdict(self).items() if v != mine[name]
        ]:
            raise ValueError("the server captures under another contract: " + "; ".join(wrong))


def answer_json(ref: FeatureRef) -> dict[str, Any]:
    """The body of an answer, as far as it is ours."""
    return {"meta_info": {FIELD: [ref.to_json()]}}


def error_json(message: str) -> dict[str, Any]:
    """The body of an answer that says what went wrong."""
    return {"error": {"message": message}}


def read_answer(body: Any, request: CaptureRequest) -> FeatureRef:
    """The ref in the answer to `request`.

    Raises:
        ValueError: if there is none, or it is of something else than was asked for.
    """
    try:
        refs = body["meta_info"][FIELD]
    except (KeyError, TypeError):
        raise ValueError(f"the answer holds no {FIELD}: {body!r:.200}") from None
    if not isinstance(refs, list) or len(refs) != 1:
        raise ValueError(f"the answer holds {refs!r:.200}; required: one feature ref")
    ref = FeatureRef.from_json(refs[0])
    asked = {
        "key": request.key,
        "sample_id": request.sample_id,
        "rows": len(request.input_ids),
        "spec_hash": request.spec_hash,
    }
    if wrong := [
        f"{name} {getattr(ref, name)!r}, asked for {v!r}"
        for name, v in asked.items()
        if getattr(ref, name) != v
    ]:
        raise ValueError("the answer is of another capture: " + "; ".join(wrong))
    return ref


class CaptureClient(ServerClient):
    """Speaks to one capture server."""

    def describe(self) -> ServerDescription:
        """What the server captures.

        Raises:
            ServerDown: if it does not answer.
            RequestFailed: if it answers, but not yet with its information.
            RequestRefused: if it captures nothing.
        """
        body = self.ask("GET", "/server_info")
        try:
            return ServerDescription.from_json(body)
        except ValueError as error:
            raise RequestRefused(f"{self.url}: {error}") from None

    def capture(self, key: str, sample_id: str, input_ids: Sequence[int], spec_hash: str) -> FeatureRef:
        """Capture one sample; returns once its features are readable.

        Args:
            key: prefix of its objects in the store.
            sample_id: identity of the sample.
            input_ids: its tokens, plain integers or those of an integer array.
            spec_hash: `spec_hash` of the contract.

        Raises:
            ServerDown: if the server does not answer.
            RequestFailed: if it failed, or answered with another capture than was asked for. Some of the
                sample's objects may then lie in the store.
            RequestRefused: if it will never capture this sample.
        """
        request = CaptureRequest(key, sample_id, tuple(map(int, input_ids)), spec_hash)
        body = self.ask("POST", "/generate", request.to_json())
        try:
            return read_answer(body, request)
        except ValueError as error:
            raise RequestFailed(f"{self.url}: sample {sample_id!r}: {error}") from None
