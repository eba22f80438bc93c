"""`specforge-capture serve`: a capture server over transformers."""

from typing import Annotated

import typer


def serve(
    target: Annotated[str, typer.Argument(help="Folder of the model.", show_default=False)],
    spec: Annotated[str, typer.Option(help="The capture contract (CaptureSpec) as JSON.")],
    store: Annotated[str, typer.Option(help='The store as JSON, such as {"kind": "files", "folder": …}.')],
    host: Annotated[str, typer.Option(help="Interface to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to listen.")] = 30000,
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")] = "cpu",
    dummy_seed: Annotated[
        int | None, typer.Option(help="Make random weights from this seed instead of reading any.")
    ] = None,
) -> None:
    """Serve captures of a target's hidden states by transformers, for models that SGLang lacks.

    specforge-launch starts it for disaggregated runs with target.backend hf.
    """
    from pydantic import ValidationError

    from specforge_config.features import CaptureSpec
    from specforge_config.store import parse_store

    try:
        contract = CaptureSpec.model_validate_json(spec)
    except ValidationError as error:
        raise ValueError(f"--spec: {error}") from None
    settings = parse_store(store)
    from specforge_capture.reference_server import serve as run

    run(target, contract, settings, host, port, device=device, dummy_seed=dummy_seed)
