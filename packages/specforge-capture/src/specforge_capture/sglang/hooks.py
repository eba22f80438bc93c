"""The functions of SGLang that a capture server hooks, and the check that each of them was.

They are the same in every supported version, up to further parameters behind those that the hooks name.

Pure: SGLang is imported by the check alone.
"""

from collections.abc import Iterable

OPTIONS = "sglang.srt.server_args.ServerArgs.add_cli_args"
PARSE = "sglang.srt.server_args.ServerArgs.from_cli_args"
OPEN = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"

LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
ENQUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
ABORT = "sglang.srt.managers.scheduler.Scheduler.abort_request"
INFORM = "sglang.srt.managers.scheduler.Scheduler.get_init_info"
RECEIVE = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests"
STREAM = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"

IN_SERVER = (OPTIONS, PARSE, OPEN)
IN_SCHEDULER = (LOAD, FORWARD, ENQUEUE, ABORT, INFORM, RECEIVE, STREAM)


def require_hooked(targets: Iterable[str]) -> None:
    """Check that SGLang hooked `targets` in this process.

    Raises:
        RuntimeError: naming those that it did not.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if missing := [target for target in targets if target not in HookRegistry._patched]:
        raise RuntimeError(
            f"SGLang did not hook {', '.join(missing)} (its log says why); required: all, for captures "
            "to be whole"
        )
