"""SGLang's entry point for this package: `python -m sglang.launch_server --enable-spec-capture …` captures.

SGLang calls `register` in each of its processes, found through the entry-point group `sglang.srt.plugins`. In
the process that parses the command line it adds the options; where a scheduler runs, and only if capture is
enabled, it registers those of `capture_scheduler`. SGLang logs a plugin or hook that fails and goes on
without it, so each side checks the other: a scheduler tells what it captures once every hook is in place, and
the server does not open its port unless it was told.

Invariant: without `--enable-spec-capture` two functions are hooked, those that define and read the options,
and neither does anything to SGLang's own. Importing this module imports no torch.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from specforge_capture.sglang import hooks


def register() -> None:
    """Register what this process needs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if multiprocessing.parent_process() is None:
        HookRegistry.register(hooks.OPTIONS, _add_options, HookType.AFTER)
        HookRegistry.register(hooks.PARSE, _parse_options, HookType.AROUND)
    elif "sglang.srt.managers.scheduler" in sys.modules:  # SGLang's detokenizer process has none
        from specforge_capture.sglang.options import CaptureSettings

        if (settings := CaptureSettings.published()) is not None:
            from specforge_capture.sglang.capture_scheduler import CaptureScheduler

            for target, hook, kind in CaptureScheduler(settings).registrations():
                HookRegistry.register(target, hook, HookType(kind))


def _add_options(result: None, parser: argparse.ArgumentParser, *rest: Any) -> None:
    from specforge_capture.sglang.options import add_arguments

    add_arguments(parser)


def _parse_options(parse: Callable[..., Any], cls: type, arguments: argparse.Namespace) -> Any:
    """Hooks `ServerArgs.from_cli_args`.

    Raises:
        ValueError: if the options are wrong, or do not go with SGLang's own or its version.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from specforge_capture.sglang.options import VARIABLE, read_arguments, require_servable
    from specforge_capture.sglang.versions import adapter_module, installed_version

    os.environ.pop(VARIABLE, None)
    settings = read_arguments(arguments)
    if settings is None:
        return parse(cls, arguments)
    adapter_module(installed_version())
    arguments.disable_prefill_cuda_graph = True  # a replayed prefill would show its states to nobody
    server_args = parse(cls, arguments)
    require_servable(server_args, settings.spec)
    settings.publish()
    HookRegistry.register(hooks.OPEN, _require_capture, HookType.BEFORE)
    HookRegistry.apply_hooks()
    hooks.require_hooked(hooks.IN_SERVER)
    return server_args


def _require_capture(
    server_args: Any,
    tokenizers: Any,
    templates: Any,
    ports: Any,
    scheduler_infos: Any,
    *rest: Any,
    **more: Any,
) -> None:
    """Before the port opens: check that the scheduler told what it captures."""
    from specforge_capture.wire import FIELD

    if FIELD not in scheduler_infos[0]:
        raise RuntimeError(
            "the scheduler started without capturing: its log names the hook or the plugin that SGLang could "
            "not apply"
        )
