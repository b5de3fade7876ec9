"""The commands. Each imports what it needs when it runs, so that ``kvatlas --help`` answers at once."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

import kvatlas
from kvatlas.errors import UserError

app = typer.Typer(
    name="kvatlas",
    help="Measure, choose and use KV-cache strategies for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option("--model", "-m", help="smollm2, a local folder with safetensors, or a hub id.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy: random weights in the shape of --model.")]
Beyond = Annotated[
    bool,
    typer.Option("--beyond-trained", help="Let a prompt pass the model's trained positions (speed and memory only)."),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvatlas {kvatlas.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure, choose and use KV-cache strategies for large language models."""


@app.command()
def compare(
    model: Model = "smollm2",
    strategies: Annotated[
        str, typer.Option("--strategies", "-s", help="Specs separated by commas; see `kvatlas strategies`.")
    ] = "full,paged,streaming:0.3,h2o:0.3,infinigen:0.3,oracle:0.1,random:0.3",
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 2048,
    new_tokens: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 4,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, or auto: bfloat16 for speed where computed in hardware, float32 for quality."
        ),
    ] = "auto",
    text: Annotated[str | None, typer.Option(help="UTF-8 text to read; Python's manual if not given.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for records and report.html; runs/MODEL-BATCHxPROMPT if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each strategy, each in a process of its own.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the order of the runs, random weights and conversations.")] = 0,
    device: Device = "cpu",
    load_format: LoadFormat = "auto",
    beyond_trained: Beyond = False,
    threads: Threads = None,
    quality: Annotated[bool, typer.Option(help="Measure what is lost, apart from the timing.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds after which one process is ended.")] = 1800.0,
    retry: Annotated[bool, typer.Option("--retry", help="Measure again what failed in an earlier run.")] = False,
    json: Annotated[str | None, typer.Option(help="Also write all records into this JSON file.")] = None,
) -> None:
    """Measure strategies against each other: speed, memory and quality. What is in DIR already is not done again."""
    from kvatlas.cli.compare import run_compare

    raise typer.Exit(
        run_compare(
            json, model=model, strategies=strategies, out=out, threads=threads, dtype=dtype,
            prompt_tokens=prompt_tokens, new_tokens=new_tokens, batch=batch, text_file=text, repeats=repeats, seed=seed,
            device=device, load_format=load_format, beyond_trained=beyond_trained, quality=quality, timeout=timeout,
            retry=retry,
        )
    )  # fmt: skip


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", "-s", help="Such as h2o:0.3; see `kvatlas strategies`.", show_default="full"),
    ] = None,
    model: Model = "smollm2",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="At most so many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Put the prompt into the model's chat template; default: if it has one."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: bfloat16 where the hardware computes in it.")
    ] = "auto",
    device: Device = "cpu",
    load_format: LoadFormat = "auto",
    beyond_trained: Beyond = False,
    threads: Threads = None,
    save_cache: Annotated[
        str | None, typer.Option(help="Write prompt, answer and cache to this file; with -n 0 only the prompt.")
    ] = None,
    load_cache: Annotated[
        str | None, typer.Option(help="Go on from such a file: the prompt is its next turn, under its strategy.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr what it took and what was kept.")] = False,
) -> None:
    """Generate text under a strategy, as it comes."""
    from kvatlas.cli.generate import Request, run_generate

    run_generate(
        Request(
            prompt=prompt, strategy=strategy, model=model, max_new_tokens=max_new_tokens, temperature=temperature,
            top_p=top_p, seed=seed, chat=chat, dtype=dtype, device=device, load_format=load_format,
            beyond_trained=beyond_trained, threads=threads, stats=stats, save_cache=save_cache, load_cache=load_cache,
        )
    )  # fmt: skip


@app.command()
def inspect(
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="Such as h2o:0.3; see `kvatlas strategies`.")],
    prompt_file: Annotated[
        str | None, typer.Option(help="UTF-8 text to read, all of it; Python's manual if not given.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Only so many tokens of the text; 1024 of the manual if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps that are looked at.")] = 16,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Feed the model's own answer; default: the text's last tokens, one a step.")
    ] = False,
    model: Model = "smollm2",
    out: Annotated[str | None, typer.Option(help="Folder for a page, a picture and all numbers.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: float32.")] = "auto",
    device: Device = "cpu",
    load_format: LoadFormat = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Why a strategy fails: what it reads in each layer and KV head, against what full attention would look at."""
    from kvatlas.cli.inspect import Request, run_inspect

    run_inspect(
        Request(
            strategy=strategy, prompt_file=prompt_file, prompt_tokens=prompt_tokens, steps=steps, greedy=greedy,
            model=model, out=out, dtype=dtype, device=device, load_format=load_format, threads=threads, json=json,
        )
    )  # fmt: skip


@app.command()
def quality(
    model: Model = "smollm2",
    strategies: Annotated[
        str, typer.Option("--strategies", "-s", help="Names or specs separated by commas; full is always among them.")
    ] = "h2o,recall,infinigen,quest",
    budgets: Annotated[
        str, typer.Option(help="Fractions of the context (1.0 is all of it) or whole numbers of tokens.")
    ] = "1.0,0.5,0.3,0.2,0.1",
    tasks: Annotated[
        str,
        typer.Option(
            help="retention, reasoning (six tasks), retrieval (three), fidelity; or single tasks: hellaswag, piqa, "
            "boolq, openbookqa, winogrande, arc_easy, arc_challenge, copa, rte, needle, keyvalue, lines, topics."
        ),
    ] = "retention,reasoning,retrieval,fidelity",
    limit: Annotated[int | None, typer.Option(help="Samples of each task; sized for each task if not given.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for cells and quality.html; runs/MODEL-quality if not given.")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder with the reasoning tasks' files; the hub if not given.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(help="Reasoning: answered examples before each question; 5 if not given.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help='Retention and retrieval: context lengths, such as "256-4000" or "512,2000".')
    ] = None,
    distance: Annotated[str | None, typer.Option(help="Retention: turns between fact and question.")] = None,
    question: Annotated[
        str | None, typer.Option(help="Retention and retrieval: after the compression, or before it.")
    ] = None,
    turns: Annotated[str | None, typer.Option(help="Retention: one-prefill, or live.")] = None,
    format: Annotated[str | None, typer.Option(help="Retention: plain, or chat (the model's template).")] = None,
    answer: Annotated[str | None, typer.Option(help="Retention: primed with its first words, or free.")] = None,
    variant: Annotated[
        str | None, typer.Option(help="Retention: one fact, two, updated, assistant (told by it), or all.")
    ] = None,
    fillers: Annotated[str | None, typer.Option(help="Retention: own, mtbench101 or sgd (with --data-dir).")] = None,
    context: Annotated[int | None, typer.Option(help="Fidelity: tokens of a window before what is read.")] = None,
    read: Annotated[int | None, typer.Option(help="Fidelity: tokens that are read one by one.")] = None,
    text: Annotated[str | None, typer.Option(help="Fidelity: UTF-8 text; Python's manual if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Of samples and examples.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: float32.")] = "auto",
    device: Device = "cpu",
    load_format: LoadFormat = "auto",
    threads: Threads = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which the battery is ended.")] = 14400.0,
    retry: Annotated[bool, typer.Option("--retry", help="Measure again what failed in an earlier run.")] = False,
    json: Annotated[str | None, typer.Option(help="Also write all cells into this JSON file.")] = None,
) -> None:
    """What strategies lose at every budget: told facts, reasoning, retrieval, fidelity. What DIR has is not redone."""
    from kvatlas.cli.quality import run_quality

    raise typer.Exit(
        run_quality(
            json, model=model, strategies=strategies, budgets=budgets, tasks=tasks, limit=limit, out=out,
            threads=threads, dtype=dtype, seed=seed, device=device, load_format=load_format, timeout=timeout,
            retry=retry,
            options={
                "data_dir": data_dir, "shots": shots, "tokens": tokens, "distance": distance, "question": question,
                "turns": turns, "format": format, "answer": answer, "variant": variant, "fillers": fillers,
                "context": context, "read": read, "text": text,
            },
        )
    )  # fmt: skip


@app.command()
def match(
    folder: Annotated[str, typer.Argument(help="A folder with cells of `kvatlas quality`.", metavar="DIR")],
    metric: Annotated[str, typer.Option(help="A task (retention), a task's metric (retention.rank), or all.")] = "all",
    within: Annotated[float, typer.Option(help="Points (of a share), or the metric's own unit.")] = 5.0,
    by: Annotated[str, typer.Option(help="Bytes by which they are matched: device, total or read (by a step).")] = (
        "device"
    ),
    json: Json = False,
) -> None:
    """For each strategy the smallest bytes at which it stays near full, interpolated between measured points only."""
    from kvatlas.cli.quality import run_match

    run_match(folder, metric, within, by, json)


@app.command()
def strategies(
    names: Annotated[list[str] | None, typer.Argument(help="Only these presets or specs.", metavar="[NAME]...")] = None,
    json: Json = False,
) -> None:
    """Every preset: its four answers, its parameters with their defaults, and where it comes from."""
    from kvatlas.cli.strategies import show

    show(names or [], json)


@app.command()
def report(
    folder: Annotated[str, typer.Argument(help="A folder with records.", metavar="DIR")],
    out: Annotated[str | None, typer.Option(help="The HTML file; DIR/report.html if not given.")] = None,
) -> None:
    """Write the report again from the records in a folder, and show the result block."""
    from kvatlas.cli.compare import run_report

    run_report(folder, out)


def run() -> None:
    """Entry point: what the user did wrong is one line and exit code 2; Ctrl-C is 130."""
    sys.exit(_run())


def _run() -> int:
    try:
        done = app(prog_name="kvatlas", standalone_mode=False)
        sys.stdout.flush()
        return done if isinstance(done, int) else 0
    except UserError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if hasattr(error, "format_message"):  # what typer says of options and arguments
            return _fail(f"{error.format_message()} {_hint(error)}", 2)
        if os.environ.get("KVATLAS_TRACEBACK"):
            raise
        return _fail(f"{type(error).__name__}: {error} (a fault in kvatlas; KVATLAS_TRACEBACK=1 shows where)", 1)


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"(see {context.command_path} --help)" if context is not None else "(see kvatlas --help)"


if __name__ == "__main__":
    run()
