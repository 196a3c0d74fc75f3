"""`stallwatch engine`: the embedded engine's commands. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from stallwatch_engine.checkpoint.write import Written

_FOLDER = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
_SEED = click.option("--seed", type=click.IntRange(0), default=0, show_default=True)


@click.group()
def engine() -> None:
    """The embedded engine: write small checkpoints, serve one."""


@engine.command("make-tiny")
@_FOLDER
@_SEED
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True
)
def make_tiny(folder: Path, seed: int, dtype: str) -> None:
    """Write the tiny checkpoint: every mechanism, a few megabytes, random weights."""
    from stallwatch_engine.checkpoint.tiny import make_tiny as make

    _write(lambda: make(folder, seed=seed, dtype=dtype), folder)


@engine.command("make-bench")
@_FOLDER
@_SEED
def make_bench(folder: Path, seed: int) -> None:
    """Write the bench checkpoint: hidden 512, 8 layers, 16 experts, about 78 M parameters."""
    from stallwatch_engine.checkpoint.bench import make_bench as make

    _write(lambda: make(folder, seed=seed), folder)


def _write(make: Callable[[], Written], folder: Path) -> None:
    """Write it and say so; what stands in the way is the operator's to see, in one sentence."""
    from stallwatch_engine.checkpoint.write import FolderInUse

    try:
        _report(make())
    except FolderInUse as exc:
        raise click.ClickException(str(exc)) from exc
    except OSError as exc:
        raise click.ClickException(f"cannot write {folder}: {exc.strerror or exc}") from exc


_MODEL = click.option(
    "--model",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the checkpoint.",
)
_AUTO = click.Choice(["auto", "float32", "bfloat16"])


@engine.command("serve")
@_MODEL
@click.option("--port", required=True, type=click.IntRange(1, 65535), help="Port to listen at.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--served-name", help="Name of the model in requests.  [default: the folder's name]")
@click.option(
    "--dtype",
    type=_AUTO,
    default="auto",
    show_default=True,
    help="Type of weights and activations.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "fp8_e4m3"]),
    default="auto",
    show_default=True,
    help="Type of cached keys and values.",
)
@click.option(
    "--device", default="cpu", show_default=True, help="Where the model runs: cpu, cuda, cuda:1."
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Threads of the kernels.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Requests in a step.",
)
@click.option("--max-model-len", type=click.IntRange(2), help="Prompt and answer together.")
@click.option(
    "--max-batched-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens in a step.",
)
@click.option(
    "--chunked-prefill/--no-chunked-prefill",
    default=True,
    show_default=True,
    help="Compute a long prompt over several steps.",
)
@click.option(
    "--max-chunk",
    type=click.IntRange(1),
    help="Tokens of one prompt in a step.  [default: a quarter]",
)
@click.option(
    "--page-size",
    type=click.IntRange(4),
    default=16,
    show_default=True,
    help="Tokens in a page of the cache.",
)
@click.option("--kv-tokens", type=click.IntRange(4), help="Tokens in all caches together.")
@click.option(
    "--runner",
    type=click.Choice(["mrv1", "mrv2"]),
    default="mrv2",
    show_default=True,
    help="mrv2 runs ahead of what the host knows; mrv1 computes one step at a time.",
)
@click.option(
    "--max-concurrent-batches",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Steps under way at a time.",
)
@click.option(
    "--ple-backend",
    type=click.Choice(["resident", "process", "disk"]),
    default="resident",
    show_default=True,
    help="Where the n-gram tables are held.",
)
@click.option(
    "--ple-folder",
    type=click.Path(file_okay=False),
    help="Table files (disk, or process over disk).",
)
@click.option("--ple-replace", is_flag=True, help="Overwrite another checkpoint's table files.")
@click.option("--ple-cpus", default="", help="CPUs of the offload process, such as 0-7.")
@click.option(
    "--step-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that any wait of a step may take.",
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Requests that may wait; more are answered 429.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, 86400, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a request may take, unless it names its own.",
)
@click.option(
    "--drain",
    type=click.FloatRange(0, 86400, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that running requests have at SIGTERM.",
)
def serve(model: Path, **given: Any) -> None:
    """Serve a checkpoint over the OpenAI API until SIGTERM."""
    import sys

    from stallwatch_engine.serve import serve as run
    from stallwatch_engine.serve import worker_options

    if given["ple_backend"] == "disk" and given["ple_folder"] is None:
        raise click.UsageError("--ple-backend disk needs --ple-folder: where the table files go")
    api = [f"--model={model}"]
    for name in ("host", "port", "served_name", "queue", "timeout", "drain"):
        value = given.pop(name)
        if value is not None:
            api.append(f"--{name.replace('_', '-')}={value}")
    sys.exit(run(worker_options(str(model), given), api))


def _report(written: Written) -> None:
    verb = "already holds" if written.existed else "now holds"
    click.echo(
        f"{written.folder} {verb} {written.parameters:,} parameters in {written.nbytes:,} bytes"
    )
