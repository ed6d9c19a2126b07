"""`kbtp serve`: run a target."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import click
from click.core import ParameterSource

from kbtp import limits
from kbtp.address import Address
from kbtp.cli.serve_index import EMBEDDED, ServedIndex, serve_index
from kbtp.cli.units import FOREVER, Seconds, Size, format_size
from kbtp.errors import ApiMisuse, KbtpError
from kbtp.key_file import read_keys
from kbtp.keys import Keys, parse_direct
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.verbs.api import Rnic
from kbtp.verbs.offload import OffloadingRnic

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DEFAULTS = TargetConfig()
_SECTION = "serve"


def _load_file(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    """Make the file's `[serve]` table the defaults of the other options: flags and environment win over it."""
    if value is None:
        return
    try:
        tables = tomllib.loads(value.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"cannot read {value}: {error}") from None
    for key in tables:
        if key != _SECTION:
            raise click.UsageError(f"{value}: unknown table or setting {key!r}; settings belong in [{_SECTION}]")
    settings = tables.get(_SECTION, {})
    if not isinstance(settings, dict):
        raise click.UsageError(f"{value}: [{_SECTION}] must be a table")
    by_flag = {flag.lstrip("-"): param.name for param in ctx.command.params for flag in param.opts}
    for key in settings:
        if key not in by_flag or key == "config":
            known = ", ".join(sorted(flag for flag in by_flag if flag != "config"))
            raise click.UsageError(f"{value}: unknown setting {key!r} in [{_SECTION}]; there are {known}")
    ctx.default_map = {str(by_flag[key]): setting for key, setting in settings.items()}


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), is_eager=True, expose_value=False, callback=_load_file,
    envvar="KBTP_CONFIG", help="TOML file; its [serve] table has the names of these options.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, envvar="KBTP_HOST", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=limits.DEFAULT_PORT, show_default=True,
    envvar="KBTP_PORT", help="Port to listen on; 0 takes a free one.")  # fmt: skip
@click.option("--block-size", type=Size(), default=_DEFAULTS.block_size_bytes, show_default="1MiB",
    envvar="KBTP_BLOCK_SIZE", help="Octets of a block, a multiple of 64.")  # fmt: skip
@click.option("--pool-size", type=Size(), envvar="KBTP_POOL_SIZE", help="Octets of the pool; rounded down to blocks.")
@click.option("--pool-blocks", type=int, envvar="KBTP_POOL_BLOCKS",
    help=f"Blocks in the pool, instead of --pool-size.  [default: {_DEFAULTS.pool_blocks}]")  # fmt: skip
@click.option("--quota", type=int, default=_DEFAULTS.quota, show_default="a sixteenth of the pool", envvar="KBTP_QUOTA",
    help="Blocks for an initiator that asks for no particular number.")  # fmt: skip
@click.option("--max-quota", type=int, default=_DEFAULTS.max_quota, show_default="the pool", envvar="KBTP_MAX_QUOTA",
    help="Most blocks for one initiator.")  # fmt: skip
@click.option("--namespace", default="", envvar="KBTP_NAMESPACE",
    help="Serve only initiators that name the same: a fingerprint of model, dtype and layout.")  # fmt: skip
@click.option("--keys", "keys_file", type=click.Path(), envvar="KBTP_KEYS",
    help="Serve only initiators with one of the keys in this file; see kbtp keys.")  # fmt: skip
@click.option("--direct", default="none", show_default=True, envvar="KBTP_DIRECT",
    help="Direct modes for initiators trusted with all blocks: load, alloc or load,alloc.")  # fmt: skip
@click.option("--direct-blocks", type=int, default=_DEFAULTS.direct_blocks, show_default=True,
    envvar="KBTP_DIRECT_BLOCKS", help="Blocks set aside for initiators that allocate directly.")  # fmt: skip
@click.option("--ticket-timeout", type=Seconds(), default=_DEFAULTS.ticket_timeout_s, show_default="10s",
    envvar="KBTP_TICKET_TIMEOUT", help="How long a block taken directly may go without BIND.")  # fmt: skip
@click.option("--name", default="", envvar="KBTP_NAME", help="Shown to initiators and in logs.")
@click.option("--linger", type=Seconds(), default=_DEFAULTS.linger_s, show_default="1h", envvar="KBTP_LINGER",
    help=f"How long an initiator's blocks outlive its connection; 0 or {FOREVER!r} are possible.")  # fmt: skip
@click.option("--drain", type=Seconds(), default=_DEFAULTS.drain_s, show_default="5s", envvar="KBTP_DRAIN",
    help="How long a peer may take over a transfer that others wait for.")  # fmt: skip
@click.option("--credits", "request_credits", type=int, default=_DEFAULTS.request_credits, show_default=True,
    envvar="KBTP_CREDITS", help="Requests an initiator may have outstanding.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1, limits.RNIC_THREADS_MAX), default=1, show_default=True,
    envvar="KBTP_THREADS", help="Event loops that the native RNIC spreads sessions over.")  # fmt: skip
@click.option(
    "--spin-us",
    type=click.IntRange(0, limits.RNIC_SPIN_MAX_US),
    default=limits.RNIC_SPIN_US,
    show_default=True,
    envvar="KBTP_SPIN_US",
    help="How long an event loop looks for more before it sleeps, in microseconds; 0 costs latency, saves power.",
)
@click.option("--index", is_flag=False, flag_value=EMBEDDED, default="", metavar="[URL]", envvar="KBTP_INDEX",
    help="Announce the target in this index; without a URL, in a Valkey server started for it.")  # fmt: skip
@click.option("--announce", default="", metavar="HOST", envvar="KBTP_ANNOUNCE",
    help="Where caches reach this target.  [default: --host, or this machine's name]")  # fmt: skip
@click.option("--rnic", "rnic_name", default="auto", show_default=True, envvar="KBTP_RNIC", help="RNIC to serve on.")
@click.option(
    "--crc/--no-crc",
    default=True,
    show_default=True,
    envvar="KBTP_CRC",
    help="Ask for a CRC of each frame. Without, where no initiator asks either (KBTP_CRC=off there), nobody notices "
    "what TCP's checksum overlooks: for initiators on Linux siw over segments that are no multiple of 4 octets.",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
    show_default=True, envvar="KBTP_LOG_LEVEL", help="What is logged to standard error.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as a JSON object.")
def serve(
    host: str, port: int, block_size: int, pool_size: int | None, pool_blocks: int | None, quota: int, max_quota: int,
    namespace: str, keys_file: str | None, direct: str, direct_blocks: int, ticket_timeout: float, name: str,
    linger: float, drain: float, request_credits: int, threads: int, spin_us: int, index: str, announce: str,
    rnic_name: str, crc: bool, log_level: str, as_json: bool,
) -> None:  # fmt: skip
    """Serve a pool of blocks until SIGTERM or Ctrl-C, then finish what is outstanding and exit.

    SIGUSR1 makes it print a line of what it counts: sessions, used blocks, and how many requests the native RNIC left
    to Python, by reason. With --json that is an object too. SIGHUP makes it read --keys again: sessions of keys that
    are gone are ended.

    Every option can also be set by the environment variable KBTP_<OPTION> or in the [serve] table of a TOML file; a
    flag wins over the environment, the environment over the file.

    \b
    Examples:
      kbtp serve --block-size 2MiB --pool-size 16GiB
      kbtp serve --pool-size 16GiB --index
      kbtp serve --host 0.0.0.0 --namespace llama-3-8b/bf16/tp2 --linger forever
      KBTP_QUOTA=512 kbtp serve --config /etc/kbtp.toml
      kbtp serve --keys target.keys
      kbtp serve --direct load,alloc --pool-blocks 1024 --direct-blocks 256
      kill -USR1 PID
    """
    keys_again = None if keys_file is None else partial(read_keys, keys_file)
    config = TargetConfig(
        block_size_bytes=block_size,
        pool_blocks=_pool_blocks(pool_size, pool_blocks, block_size),
        quota=quota,
        max_quota=max_quota,
        request_credits=request_credits,
        namespace=namespace.encode(),
        keys=Keys() if keys_again is None else keys_again(),
        name=name,
        direct=parse_direct(direct),
        direct_blocks=direct_blocks,
        ticket_timeout_s=ticket_timeout,
        linger_s=linger,
        drain_s=drain,
    )
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _check_memory(config)
    try:
        rnic = open_rnic(rnic_name, spin_us=spin_us, crc=crc)
    except OSError as error:
        raise click.UsageError(f"cannot open the RNIC {rnic_name}: {error}") from None
    try:
        server = Server(config, rnic, threads=threads, read_keys=keys_again)
    except (MemoryError, OSError) as error:
        raise click.UsageError(f"cannot allocate a pool of {format_size(config.pool_bytes)}: {error}") from None
    try:
        address = server.listen(host, port)
    except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode is a UnicodeError
        server.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise click.UsageError(f"cannot listen on {Address(host, port)}: {why}") from None
    _stop_on_signals(server)
    _tell_counters_on_signal(server, rnic, as_json)
    if keys_file is not None:
        signal.signal(signal.SIGHUP, lambda _number, _frame: server.request_keys())
    with _indexed(index, announce, server, address, port) as index_url:
        click.echo(_ready_line(address, config, index_url, as_json))
        sys.stdout.flush()
        server.run()


@contextlib.contextmanager
def _indexed(index: str, announce: str, server: Server, address: Address, port: int) -> Iterator[str]:
    """The URL of the index that the target is announced in meanwhile; empty without one."""
    served: ServedIndex | None = None
    if index:
        try:
            served = serve_index(index, announce, server, address, port)
        except KbtpError as error:
            server.close()
            raise click.UsageError(f"--index: {error}") from None
    try:
        yield served.url if served else ""
    finally:
        if served:
            served.close()


def _pool_blocks(pool_size: int | None, pool_blocks: int | None, block_size: int) -> int:
    if pool_size is not None and pool_blocks is not None:
        # They say the same thing: whichever comes from where it counts for more.
        size_rank, blocks_rank = _rank("pool_size"), _rank("pool_blocks")
        if size_rank == blocks_rank:
            raise click.UsageError("--pool-size and --pool-blocks say the same thing; give one of them")
        if size_rank < blocks_rank:
            pool_size = None
    if pool_size is None:
        return _DEFAULTS.pool_blocks if pool_blocks is None else pool_blocks
    if not 0 < block_size <= pool_size:
        raise ApiMisuse(f"a pool of {pool_size} octets holds no block of {block_size}")
    return pool_size // block_size


def _rank(parameter: str) -> int:
    """How much the source of a parameter's value counts: file, environment, command line."""
    sources = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
    source = click.get_current_context().get_parameter_source(parameter)
    return sources.index(source) if source in sources else -1


def _check_memory(config: TargetConfig) -> None:
    """Refuse at the start what would be killed for want of memory once blocks are stored."""
    available = available_memory_bytes()
    if available is not None and config.pool_bytes > available:
        raise click.UsageError(
            f"a pool of {config.pool_blocks} blocks of {format_size(config.block_size_bytes)} takes "
            f"{format_size(config.pool_bytes)}, but {format_size(available)} of memory are available; "
            "give a smaller --pool-size"
        )


def available_memory_bytes() -> int | None:
    """What the system, and the control group this process is in, still have to give; None if neither says."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            given_back = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Cached files count as used, but those nobody reads any more make room.
            found.append(max(0, int(limit) - used + int(given_back.get("inactive_file", 0))))
    except (OSError, ValueError, IndexError):
        pass  # no cgroup v2 here: the system's own figure is all there is
    return min(found, default=None)


def _stop_on_signals(server: Server) -> None:
    def stop(number: int, _frame: FrameType | None) -> None:
        if server.stopping:
            os._exit(128 + number)  # asked twice: whoever waits for us has lost patience
        server.request_stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _tell_counters_on_signal(server: Server, rnic: Rnic, as_json: bool) -> None:
    def tell(_number: int, _frame: FrameType | None) -> None:
        # Past the buffered stream, which whatever was interrupted may be writing to.
        with contextlib.suppress(OSError):
            os.write(1, f"{_counters_line(server, rnic, as_json)}\n".encode())

    signal.signal(signal.SIGUSR1, tell)


def _counters_line(server: Server, rnic: Rnic, as_json: bool) -> str:
    sessions, pool_blocks = len(server.target.sessions), server.config.pool_blocks
    used_blocks = pool_blocks - server.target.store.free_blocks
    punts = dict(rnic.punts) if isinstance(rnic, OffloadingRnic) else None
    if as_json:
        return json.dumps(
            {"sessions": sessions, "used_blocks": used_blocks, "pool_blocks": pool_blocks, "punts": punts}
        )
    line = f"kbtp: sessions: {sessions}, blocks used: {used_blocks} of {pool_blocks}"
    if punts is None:
        return line  # all is done in Python
    said = ", ".join(f"{count} {reason}" for reason, count in punts.items() if count)
    return f"{line}, requests left to Python: {said or 'none'}"


def _ready_line(address: Address, config: TargetConfig, index_url: str, as_json: bool) -> str:
    if as_json:
        ready = {
            "url": str(address),
            "block_size_bytes": config.block_size_bytes,
            "pool_blocks": config.pool_blocks,
            "quota_blocks": config.default_quota,
            "namespace": config.namespace.decode(),
            "pid": os.getpid(),
        }
        if index_url:
            ready["index"] = index_url
        return json.dumps(ready)
    return (
        f"kbtp: serving {address} with {config.pool_blocks} blocks of {format_size(config.block_size_bytes)} "
        f"({format_size(config.pool_bytes)}){f', index {index_url}' if index_url else ''}"
    )
