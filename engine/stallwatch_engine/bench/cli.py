"""`stallwatch bench`: flags in, a run, a report out. Nothing heavy is imported before a run begins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stallwatch_engine.bench.units import parse_seconds

if TYPE_CHECKING:
    from stallwatch_engine.bench.plan import Plan
    from stallwatch_engine.bench.prompt import Prompt
    from stallwatch_engine.bench.report import Report
    from stallwatch_engine.bench.run import Options
    from stallwatch_engine.bench.target import Target

F = TypeVar("F", bound=Callable[..., Any])

AT_ONCE, OVER_TIME = 16, 1024  # default concurrency when all are due at once, and when not
RANDOM_REQUESTS = 100
MAX_TOKENS = 64

EPILOG = """
\b
Examples:
  stallwatch bench --url http://127.0.0.1:8000 -n 200 -c 32
  stallwatch bench --request-rate 8 --sharegpt conversations.json -n 500
  stallwatch bench --trace calls.jsonl --fail-fast-on-timeout
  stallwatch bench --gate ttft_p99=2s --gate tokens_per_s=100

\b
Exit codes: 0 every request completed and every gate passed; 1 a request
did not complete, or the run could not begin; 2 usage; 3 a gate failed;
124 stopped by the first timeout (--fail-fast-on-timeout); 130 interrupted.
"""


class Seconds(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """'60s', '1m30s', '250ms', or plain seconds; never zero."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = value if isinstance(value, float) else parse_seconds(str(value))
        if seconds is None or seconds <= 0:
            self.fail(f"{value!r} is no duration above zero: write 60s, 1m30s or 250ms", param, ctx)
        return float(seconds)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Server."),
    click.option("--model", default="", help="Model name; the server's first one."),
    click.option(
        "--endpoint",
        type=click.Choice(["completions", "chat"]),
        default="completions",
        show_default=True,
        help="Which interface.",
    ),
    click.option("--stream/--no-stream", default=True, help="Stream the answers (default)."),
    click.option("-n", "--requests", type=click.IntRange(1), help="How many: 100, or all prompts."),
    click.option("-c", "--concurrency", type=click.IntRange(1), help="Most in flight at a time."),
    click.option("--request-rate", type=float, help="Requests per second; all at once."),
    click.option(
        "--arrivals",
        type=click.Choice(["poisson", "constant"]),
        default="poisson",
        show_default=True,
        help="Gaps at --request-rate.",
    ),
    click.option("--prompts", type=_FILE, help="Prompts: one a line, or .jsonl objects."),
    click.option("--sharegpt", type=_FILE, help="Prompts: ShareGPT-like JSON."),
    click.option("--trace", type=_FILE, help=".jsonl with `at` seconds: sent at those times."),
    click.option("--time-scale", type=float, help="Stretch the trace's times by this."),
    click.option("--shuffle", is_flag=True, help="Prompts of a file in a random order."),
    click.option("--input-words", type=click.IntRange(1), default=128, show_default=True,
                 help="Length of random prompts."),
    click.option("--vocab-size", type=click.IntRange(1), help="Random token ids under this."),
    click.option("--max-tokens", type=click.IntRange(1), help="Longest answer (64)."),
    click.option("--ignore-eos", is_flag=True, help="Answers of exactly --max-tokens."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="Sampling."),
    click.option("--extra-body", default="", help="JSON object added to every request."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals."),
    click.option("--api-key-env", default="", metavar="NAME", help="Variable with the API key."),
    click.option("--timeout", type=Seconds(), default=600.0, help="Of a whole request (10m)."),
    click.option("--connect-timeout", type=Seconds(), default=10.0, help="To connect (10s)."),
    click.option("--read-timeout", type=Seconds(), help="Between two reads (none)."),
    click.option("--duration", type=Seconds(), help="Send nothing new after this long."),
    click.option("--fail-fast-on-timeout", is_flag=True, help="The first timeout stops the run."),
    click.option("--gate", "gates", multiple=True, metavar="NAME=LIMIT",
                 help="Must hold, e.g. ttft_p99=2s; again for more."),
    click.option("-o", "--output", type=click.Choice(["table", "json", "csv"]), help="On stdout."),
    click.option("--json", "json_file", type=_NEW_FILE, help="Write the report as JSON too."),
    click.option("--csv", "csv_file", type=_NEW_FILE, help="Write the requests as CSV too."),
    click.option("-q", "--quiet", is_flag=True, help="No progress bar."),
)  # fmt: skip


def _options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@_options
@click.pass_context
def bench(ctx: click.Context, /, **given: Any) -> None:
    """Load a server with requests, measure it, and say whether it was good enough.

    Latencies are measured from the moment a request is sent; `queue` is how long it waited past
    its due time for a free place.
    """
    from stallwatch_engine.bench.errors import PlanRefused, TargetUnusable

    try:
        _check_files(given)
        target, plan, options = _target(given), _plan(given), _run_options(given)
        report = _run(plan, target, options, shown=_bar_shown(ctx, quiet=given["quiet"]))
    except PlanRefused as error:
        raise click.UsageError(str(error), ctx) from error
    except TargetUnusable as error:
        raise click.ClickException(str(error)) from error
    _write(report, given, _output(ctx, given["output"]))
    ctx.exit(report.exit_code)


def _run(plan: Plan, target: Target, options: Options, *, shown: bool) -> Report:
    from stallwatch_engine.bench.progress import Bar
    from stallwatch_engine.bench.run import Hooks, run

    with Bar(len(plan.prompts), shown=shown) as bar:
        return run(plan, target, options, Hooks(on_result=bar.seen))


def _target(given: dict[str, Any]) -> Target:
    from stallwatch_engine.bench.target import Target

    extra: dict[str, Any] = {"temperature": given["temperature"]}
    if given["ignore_eos"]:
        extra["ignore_eos"] = True
    return Target(
        url=given["url"],
        model=given["model"],
        endpoint=given["endpoint"],
        stream=given["stream"],
        extra=extra | _extra_body(given["extra_body"]),
        headers=_headers(given["api_key_env"]),
    )


def _extra_body(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(str(error), param_hint="--extra-body") from None
    if not isinstance(found, dict):
        raise click.BadParameter("no JSON object", param_hint="--extra-body")
    return found


def _headers(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable, "")
    if not key or not key.isprintable():
        raise click.BadParameter(f"{variable} is not set, or no key", param_hint="--api-key-env")
    return {"Authorization": f"Bearer {key}"}


def _plan(given: dict[str, Any]) -> Plan:
    from stallwatch_engine.bench import arrivals
    from stallwatch_engine.bench.plan import Plan

    prompts = _prompts(given)
    count, rate, seed = len(prompts), given["request_rate"], given["seed"]
    if given["trace"]:
        scale = given["time_scale"] if given["time_scale"] is not None else 1.0
        times = arrivals.self_timed((prompt.at for prompt in prompts), scale)
        mode = "self-timed"
    elif rate is None:
        times, mode = arrivals.immediate(count), "immediate"
    elif given["arrivals"] == "constant":
        times, mode = arrivals.constant(count, rate), f"constant at {rate:g}/s"
    else:
        times, mode = arrivals.poisson(count, rate, seed), f"poisson at {rate:g}/s"
    most = given["concurrency"] or (AT_ONCE if mode == "immediate" else OVER_TIME)
    return Plan(tuple(prompts), times, most, mode)


def _prompts(given: dict[str, Any]) -> list[Prompt]:
    from stallwatch_engine.bench import sources
    from stallwatch_engine.bench.plan import MAX_REQUESTS

    _check_sources(given)
    count, seed, most = given["requests"], given["seed"], given["max_tokens"]
    if count is not None and count > MAX_REQUESTS:
        raise click.BadParameter(f"at most {MAX_REQUESTS}", param_hint="--requests")
    if given["trace"]:
        return sources.from_file(given["trace"], max_tokens=most or MAX_TOKENS)[:count]
    if given["sharegpt"]:
        found = sources.from_sharegpt(given["sharegpt"], max_tokens=most)
    elif given["prompts"]:
        found = sources.from_file(given["prompts"], max_tokens=most or MAX_TOKENS)
    else:
        return sources.from_random(
            count or RANDOM_REQUESTS,
            words=given["input_words"],
            max_tokens=most or MAX_TOKENS,
            seed=seed,
            vocab=given["vocab_size"],
        )
    return sources.choose(found, count, seed=seed, shuffle=given["shuffle"])


def _check_sources(given: dict[str, Any]) -> None:
    """Flags that contradict each other are an error, never one of them ignored."""
    named = [name for name in ("prompts", "sharegpt", "trace") if given[name]]
    if len(named) > 1:
        raise click.UsageError(f"--{named[0]} and --{named[1]}: give one of them")
    if given["trace"] and given["request_rate"] is not None:
        raise click.UsageError("--trace has times of its own: leave --request-rate out")
    if given["trace"] and given["shuffle"]:
        raise click.UsageError("--trace keeps its order: leave --shuffle out")
    if given["time_scale"] is not None and not given["trace"]:
        raise click.UsageError("--time-scale stretches a --trace")
    if given["vocab_size"] and named:
        raise click.UsageError(f"--vocab-size is for random prompts, not for --{named[0]}")


def _run_options(given: dict[str, Any]) -> Options:
    from stallwatch_engine.bench.gate import parse_gate
    from stallwatch_engine.bench.run import Options
    from stallwatch_engine.bench.target import Timeouts

    return Options(
        timeouts=Timeouts(given["timeout"], given["connect_timeout"], given["read_timeout"]),
        fail_fast=given["fail_fast_on_timeout"],
        gates=tuple(parse_gate(text) for text in given["gates"]),
        duration_s=given["duration"],
        signals=True,
    )


def _output(ctx: click.Context, own: str | None) -> str:
    """Our flag, else the one before the command's name (`stallwatch -o json bench`)."""
    before = getattr(ctx.find_root().obj, "output", "table")
    return own or ("json" if before == "json" else "table")


def _bar_shown(ctx: click.Context, *, quiet: bool) -> bool:
    before = bool(getattr(ctx.find_root().obj, "quiet", False))
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not (quiet or before)


def _check_files(given: dict[str, Any]) -> None:
    """Before the run: an hour of measurements must not end at a folder that is not there."""
    for name in ("json_file", "csv_file"):
        path: Path | None = given[name]
        if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
            hint = f"--{name.removesuffix('_file')}"
            raise click.BadParameter(f"cannot write into {path.parent}", param_hint=hint)


def _write(report: Report, given: dict[str, Any], output: str) -> None:
    """The report on stdout first: it is there even when a file cannot be written."""
    from stallwatch_engine.bench.table import lines

    if output == "csv":
        click.echo(report.to_csv(), nl=False)
    elif output == "json":
        click.echo(_json(report))
    else:
        for line in lines(report):
            click.echo(line)
    if given["json_file"]:
        _replace(given["json_file"], _json(report) + "\n")
    if given["csv_file"]:
        _replace(given["csv_file"], report.to_csv())


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2, allow_nan=False)


def _replace(path: Path, text: str) -> None:
    """The whole file or the old one, never half of it."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise click.ClickException(f"{path}: {error.strerror}") from error


if __name__ == "__main__":
    bench()
