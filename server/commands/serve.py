"""The command `headrace serve`: from flags to an engine, settings and a running server; holds no logic of its own.

Flags have vLLM's names where they mean the same, and the names of the fields of `EngineConfig` beside them.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer
from rich.console import Console

from headrace.engine import InvalidParams
from headrace.engine.tools import format_names
from headrace.server.commands.arguments import (
    BlockOption,
    ContextOption,
    DefaultsOption,
    DeviceOption,
    DtypeOption,
    FileOption,
    ImplementationOption,
    ModelArgument,
    SeedOption,
    SpeculateOption,
    chosen_model,
)
from headrace.server.commands.flags import flags_named

if TYPE_CHECKING:
    from headrace.server.observability.logs import LogFormat
    from headrace.server.service import Service
    from headrace.server.settings import ServerSettings

__all__ = ["serve"]

logger = logging.getLogger("headrace.server")

_LOG_LEVELS = ("debug", "info", "warning", "error")

KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=SECRET, or a secret alone; repeatable. The name is the tenant: tenants share no cached prompts. "
        "Other users of this machine can read command lines: prefer the environment variable.",
        envvar="HEADRACE_API_KEY",
    ),
]
AdminKeyOption = Annotated[
    list[str] | None,
    typer.Option(help="Like --api-key; such keys may set limits and load adapters.", envvar="HEADRACE_ADMIN_API_KEY"),
]
MetricsKeyOption = Annotated[
    str | None,
    typer.Option(help="A secret that opens /metrics and nothing else.", envvar="HEADRACE_METRICS_API_KEY"),
]
VllmNamesOption = Annotated[
    bool, typer.Option("--vllm-metric-names", help="Show metrics under vLLM's names too, where they mean the same.")
]
HostOption = Annotated[str, typer.Option(help="Address to listen on; without keys only one of this machine itself.")]
PortOption = Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)]
HostsOption = Annotated[
    list[str] | None,
    typer.Option(help="Host header to answer to; repeatable; * is any. Left out: localhost, or any if there are keys."),
]
OriginsOption = Annotated[
    list[str] | None, typer.Option(help="Origin of web pages that may ask; repeatable. Left out: none.")
]
PageOption = Annotated[bool, typer.Option(help="Serve the chat playground at /.")]
NameOption = Annotated[str | None, typer.Option(help="Name by which clients ask for the model.")]
ParserOption = Annotated[
    str | None,
    typer.Option(
        help=f"Format of tool calls: {', '.join(format_names())}. Left out, it is found from the chat template."
    ),
]
FormatOption = Annotated[str, typer.Option(help="auto reads the weights; random invents them, for benchmarks.")]
RowsOption = Annotated[
    int | None, typer.Option("--max-num-seqs", "--max-rows", help="Most requests in one step.", min=1)
]
BatchOption = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", "--max-batched-tokens", help="Most tokens in one step.", min=1)
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory-bytes",
        "--kv-memory",
        help="Memory of keys and values, such as 40GiB; left out, a share of what is free.",
    ),
]
KvDtypeOption = Annotated[
    str,
    typer.Option("--kv-cache-dtype", "--kv-dtype", help="Type of keys and values: auto is --dtype; fp8 needs a GPU."),
]
PrefixOption = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        "--prefix-cache/--no-prefix-cache",
        help="Keep past prompts for requests that begin alike.",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--scheduling-policy",
        "--policy",
        help="Who is served first: first_come, ageing, size_classes, fair_share or deadlines. Left out: fair_share "
        "where there are two keys or more, else first_come.",
    ),
]
BackgroundOption = Annotated[
    bool,
    typer.Option(
        "--background-last", help="Serve priorities above 0 only where no others wait; with fair_share or deadlines."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another field of EngineConfig, NAME=VALUE, such as allow_download=true; repeatable."),
]
AdapterOption = Annotated[
    list[str] | None, typer.Option(help="NAME=FOLDER of an adapter in PEFT's format to load at the start; repeatable.")
]
AdapterFolderOption = Annotated[
    str | None, typer.Option(help="Folder below which admin keys may load adapters while the server runs.")
]
SlotsOption = Annotated[
    int,
    typer.Option(
        "--max-loras",
        "--adapter-slots",
        help="Most adapters on the device at a time; 0 is 16 with --lora-modules or --adapter-folder, else none.",
        min=0,
    ),
]
AdapterRankOption = Annotated[
    int, typer.Option("--max-lora-rank", "--max-adapter-rank", help="Largest rank of an adapter.", min=1, max=256)
]
QueueOption = Annotated[int, typer.Option(help="Requests that may wait; more are refused.", min=1)]
StoredOption = Annotated[int, typer.Option(help="Bytes of memory for stored responses; 0 stores none.", min=0)]
WaitOption = Annotated[float, typer.Option(help="Seconds that a request may wait for its first step.")]
TimeOption = Annotated[float, typer.Option(help="Seconds that a request may take.")]
ConcurrencyOption = Annotated[int | None, typer.Option(help="Most requests of one key at once.", min=1)]
RateOption = Annotated[int | None, typer.Option(help="Most tokens of one key a minute.", min=1)]
DrainOption = Annotated[
    float,
    typer.Option(help="Seconds that answers have to end after SIGTERM or Ctrl-C; a second one ends them at once."),
]
LogFormatOption = Annotated[
    str, typer.Option(help="Log one line for each request, as text or json, without what was asked; off logs none.")
]
LogOption = Annotated[
    str, typer.Option("--uvicorn-log-level", help="Least level of uvicorn's own log: debug, info, warning or error.")
]


def serve(
    model: ModelArgument = None,
    file: FileOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: KeyOption = None,
    admin_api_key: AdminKeyOption = None,
    allowed_hosts: HostsOption = None,
    allowed_origins: OriginsOption = None,
    page: PageOption = True,
    served_model_name: NameOption = None,
    tool_call_parser: ParserOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    load_format: FormatOption = "auto",
    model_impl: ImplementationOption = "auto",
    generation_defaults: DefaultsOption = "model",
    max_model_len: ContextOption = None,
    max_num_seqs: RowsOption = None,
    max_num_batched_tokens: BatchOption = None,
    kv_cache_memory_bytes: MemoryOption = None,
    kv_cache_dtype: KvDtypeOption = "auto",
    block_size: BlockOption = 16,
    enable_prefix_caching: PrefixOption = True,
    seed: SeedOption = 0,
    speculate: SpeculateOption = None,
    lora_modules: AdapterOption = None,
    adapter_folder: AdapterFolderOption = None,
    max_loras: SlotsOption = 0,
    max_lora_rank: AdapterRankOption = 64,
    scheduling_policy: PolicyOption = None,
    background_last: BackgroundOption = False,
    more: SetOption = None,
    max_queue: QueueOption = 1024,
    max_stored_bytes: StoredOption = 64 * 2**20,
    queue_timeout: WaitOption = 60.0,
    request_timeout: TimeOption = 3600.0,
    max_concurrency_per_key: ConcurrencyOption = None,
    tokens_per_minute_per_key: RateOption = None,
    shutdown_timeout: DrainOption = 30.0,
    metrics_api_key: MetricsKeyOption = None,
    vllm_metric_names: VllmNamesOption = False,
    log_format: LogFormatOption = "text",
    log_level: LogOption = "info",
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    chosen: dict[str, Any] = {
        "api_keys": _named(api_key, "key"),
        "admin_keys": _named(admin_api_key, "admin"),
        "metrics_key": metrics_api_key,
        "vllm_metric_names": vllm_metric_names,
        "default_limits": {"concurrency": max_concurrency_per_key, "tokens_per_minute": tokens_per_minute_per_key},
        "allowed_origins": allowed_origins or (),
        "page": page,
        "served_model_name": served_model_name,
        "tool_call_parser": tool_call_parser,
        "adapters": _adapters(lora_modules, model),
        "adapter_folder": _adapter_folder(adapter_folder, admin_api_key),
        "max_queue": max_queue,
        "max_stored_bytes": max_stored_bytes,
        "queue_timeout": queue_timeout,
        "request_timeout": request_timeout,
        "drain_seconds": shutdown_timeout,
    }
    options = {
        "file": file,
        "device": device,
        "dtype": dtype,
        "load_format": load_format,
        "model_impl": model_impl,
        "generation_defaults": generation_defaults,
        "max_context": max_model_len,
        "max_rows": max_num_seqs,
        "max_batched_tokens": max_num_batched_tokens,
        "kv_memory": kv_cache_memory_bytes,
        "kv_dtype": kv_cache_dtype,
        "page_size": block_size,
        "prefix_cache": enable_prefix_caching,
        "seed": seed,
        "speculation": speculate,
        "adapter_slots": max_loras or (16 if chosen["adapters"] or adapter_folder else 0),
        "max_adapter_rank": max_lora_rank,
        "policy": _policy(scheduling_policy, len(chosen["api_keys"]) + len(chosen["admin_keys"]), background_last),
        **_assignments(more),
    }
    _check_parser(tool_call_parser)
    listening = {"host": host, "port": port, "log_level": _log_level(log_level)}
    logged = _log_format(log_format)
    with flags_named():
        settings = _settings(host, allowed_hosts, chosen)
        _check_address(host, port)
        main = partial(_serve, chosen_model(model), options, settings, logged, listening)
        anyio.run(main, backend_options={"use_uvloop": find_spec("uvloop") is not None})


def _adapters(given: list[str] | None, model: str | None) -> dict[str, str]:
    """Return the folders of the named adapters; where no model is named either, of the examples' adapters."""
    from headrace.server.demo import demo_adapters

    if given is None and model is None:
        return {name: str(folder) for name, folder in demo_adapters().items()}
    named = {}
    for each in given or ():
        name, separator, folder = each.partition("=")
        if not separator or not folder or name in named:
            raise typer.BadParameter(f"--lora-modules {each}: give NAME=FOLDER, each name once")
        named[name] = folder
    return named


def _policy(given: str | None, keys: int, background_last: bool) -> str | dict[str, Any]:
    """Return the policy that was named; by default, with several keys, one under which tenants share fairly."""
    name = given or ("fair_share" if keys > 1 else "first_come")
    if not background_last:
        return name
    if name not in ("fair_share", "deadlines"):
        raise typer.BadParameter(f"--background-last: give --scheduling-policy fair_share or deadlines, not {name}")
    return {"name": name, "background_last": True}


def _adapter_folder(given: str | None, admin_keys: list[str] | None) -> str | None:
    if given is not None and not Path(given).expanduser().is_dir():
        raise typer.BadParameter(f"--adapter-folder {given}: there is no such folder")
    if given is not None and not admin_keys:
        raise typer.BadParameter(f"--adapter-folder {given}: without --admin-api-key nobody may load from it")
    return given


def _settings(host: str, allowed_hosts: list[str] | None, chosen: dict[str, Any]) -> ServerSettings:
    from headrace.server.settings import ServerSettings

    has_keys = bool(chosen["api_keys"] or chosen["admin_keys"])
    if not has_keys and not _is_loopback(host):
        raise typer.BadParameter(f"--host {host}: without --api-key only loopback addresses are served")
    if allowed_hosts or has_keys:  # a page that lured a browser here has no key
        chosen = {**chosen, "allowed_hosts": allowed_hosts or ("*",)}
    return ServerSettings(**chosen)


def _log_level(value: str) -> str:
    if value not in _LOG_LEVELS:
        raise typer.BadParameter(f"--uvicorn-log-level {value}: give one of {', '.join(_LOG_LEVELS)}")
    return value


def _check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened to, or too few open files, before the model is opened."""
    from headrace.server.http.running import most_connections

    most_connections()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        errors = [_binding_error(family, kind, protocol, address) for family, kind, protocol, _, address in found]
        for error in errors:
            # Some of a name's addresses may be another machine's, but not all.
            if error is not None and (error.errno != errno.EADDRNOTAVAIL or all(errors)):
                raise error
    except OSError as error:
        raise typer.BadParameter(f"--host {host} --port {port}: {error.strerror or error}") from None


def _binding_error(family: int, kind: int, protocol: int, address: Any) -> OSError | None:
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
        except OSError as error:
            return error
    return None


def _check_parser(value: str | None) -> None:
    from headrace.engine.tools.registry import parser_class

    try:
        parser_class(value)
    except InvalidParams as error:
        raise typer.BadParameter(f"--tool-call-parser {value}: {error}") from None


def _log_format(value: str) -> LogFormat:
    for known in ("text", "json", "off"):
        if value == known:
            return known
    raise typer.BadParameter(f"--log-format {value}: give text, json or off")


async def _serve(
    model: str, options: dict[str, Any], settings: ServerSettings, log_format: LogFormat, listening: dict[str, Any]
) -> None:
    from headrace.server.app import create_app
    from headrace.server.commands.opening import opened
    from headrace.server.http.running import make_server, settle_memory
    from headrace.server.observability.logs import Line, set_up_logs

    set_up_logs(log_format)
    async with opened(model, Console(stderr=True), **options) as engine:
        app = create_app(engine, settings)
        service: Service = app.state.service
        await service.load_adapters()  # before serving, so that an error is told in one sentence
        info, adapters = engine.info, ",".join(engine.adapters.versions) or None
        fields = {"model": service.model, "adapters": adapters, "device": info.device, "max_context": info.max_context}
        fields["policy"] = options["policy"]
        logger.info("%s", Line("serving", fields))
        settle_memory()
        await make_server(app, log_config=None, **listening).serve()


def _named(values: list[str] | None, prefix: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for place, value in enumerate(values or (), 1):
        name, _, secret = value.partition("=")
        if not secret.strip("="):  # only the padding of a bare secret in base64
            name, secret = f"{prefix}-{place}", value
        if name in keys:
            raise typer.BadParameter(f"{prefix} {place}: another one has its name already")  # which may be secret
        keys[name] = secret
    return keys


def _assignments(values: list[str] | None) -> dict[str, str]:
    fields = [entry.partition("=") for entry in values or ()]
    for name, separator, _ in fields:
        if not separator:
            raise typer.BadParameter(f"--set {name}: give NAME=VALUE")
    return {name: value for name, _, value in fields}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
