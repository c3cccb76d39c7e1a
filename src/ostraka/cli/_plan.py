"""`ostraka plan`: the cost of a checkpoint before it is written."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ostraka.cli._arguments import AXES, RATE, SIZE, TIME, complete_words, json_option, option
from ostraka.cli._output import echo_json, echo_lines, echo_text, with_schema
from ostraka.cli._report import check_output, write_page
from ostraka.errors import OstrakaError, printable, store_error

if TYPE_CHECKING:
    from ostraka.planner.time import Bandwidths
    from ostraka.report.plan import PlanAnswer, PlanQuestion

LIMIT_EXCEEDED = 3
_LIST = ""
"""The value of --names that stands alone."""

# The planner is imported where it is used: the other commands must not wait for it.


@click.command()
@click.argument(
    "source",
    required=False,
    metavar="SOURCE",
    shell_complete=complete_words("ostraka.families.catalog:MODELS"),
)
@option("--mesh", AXES, "Axes and sizes: data=64,model=8.")
@option("--hosts", click.IntRange(1), "Default: one for every 8 devices.")
@option(
    "--rules",
    str,
    "dp, fsdp, tp, fsdp+tp, or a JSON file of patterns and specs.",
    shell_complete=complete_words("ostraka.planner.rules:RULES"),
)
@option(
    "--optimizer",
    str,
    "adamw, adam, sgd, adafactor, lion or none: adds its state.",
    shell_complete=complete_words("ostraka.planner.state:OPTIMIZERS", files=False),
)
@option(
    "--dtype",
    str,
    "Parameter dtype of a built-in model (default: as published), or the dtype to save a "
    "function's or checkpoint's arrays as.",
)
@option(
    "--optimizer-dtype",
    str,
    "Dtype of the moments that --optimizer adds (default: that of the parameters, as in optax).",
)
@option("--compress", click.Choice(["zstd"]), "Estimate the size of compressed files.")
@option("--parity", click.IntRange(0, 2), "Parity files, as in save.", default=0)
@option("--max-file-bytes", SIZE, "Split files here, as in save.")
@option("--onto", AXES, "Plan a restore onto this mesh.", multiple=True)
@option("--onto-hosts", click.IntRange(1), "Default: the same devices per host.")
@option("--write-bandwidth", RATE, "Of one host: 2GB/s, 25Gbit/s.")
@option("--read-bandwidth", RATE, "Of one host.")
@option("--storage-bandwidth", RATE, "Of the storage, for all hosts together.")
@option(
    "--device-bandwidth", RATE, "From a host's devices to its memory: how long save_async blocks."
)
@option("--probe probed", "DIR", "Measure this machine's bandwidths, in a directory.")
@option("--keep", click.IntRange(1), "Storage for this number of checkpoints.")
@option("--mtbf", TIME, "Mean time between failures of the whole job, with its unit: 4h.")
@option("--max-file", SIZE, "Exit with 3 if a file is larger.")
@option("--max-host-memory", SIZE, "Exit with 3 if a save takes more.")
@option("--compare", "OPTIONS", "A variant: '--mesh data=8'.", multiple=True)
@json_option("Print all of it as JSON.")
@option("-o --output", "FILE", "Write the JSON to a file as well.")
@option(
    "--report",
    "FILE",
    "Write a page to look at instead, with sliders for the mesh, the dtype and the bandwidths.",
)
@option(
    "--names",
    "[NAMES]",
    "Alone: list the built-in models. Else: plan a directory of safetensors files as the leaves "
    "that a restore makes of them; as in convert, such as hf.",
    is_flag=False,
    flag_value=_LIST,
)
@click.pass_context
def plan(context: click.Context, **given: Any) -> None:
    """Show what a checkpoint of SOURCE will cost, without writing it.

    Sizes are exact to the byte.

    SOURCE is a built-in model (--names), a Hugging Face config.json, a checkpoint, or a Python
    function as package.module:function or file.py:function. The function makes an NNX model, a pair
    of model and optimizer, or a dict. It is evaluated without making arrays, with the mesh set.
    Without --rules, arrays are sharded by their own annotations and shardings.

    Times need bandwidths: give them, or --probe DIR.

    The exit code is 3 if a limit is exceeded.

    \b
    Examples:
      ostraka plan runs/7
      ostraka plan llama-3.1-8b --mesh data=64,model=8 --optimizer adamw
      ostraka plan llama-3.1-8b --mesh data=64 --optimizer adamw --optimizer-dtype float32
      ostraka plan my.models:make --mesh data=8 --rules fsdp --max-file 5GiB
      ostraka plan llama/ --names hf --mesh data=8
      ostraka plan gpt2 --mesh data=8 --compare "--rules dp" --compare "--mesh data=16"
      ostraka plan llama-3.1-405b --mesh data=128,model=8 --optimizer adamw --report plan.html
    """
    if given["names"] == _LIST:
        from ostraka.families.catalog import MODELS

        echo_json({"names": list(MODELS)}) if given["as_json"] else echo_lines(list(MODELS))
        return
    if given["source"] is None:
        raise click.MissingParameter(ctx=context, param=context.command.params[0])
    if given["report"] is not None:
        check_output(given["report"])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes are all that is needed
    try:
        answers = _answer(context, given)
    except OstrakaError:
        raise
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error), context) from error
    document = _document(given["source"], answers)
    text = json.dumps(with_schema(document), indent=1, allow_nan=False)
    if given["output"] is not None:
        try:
            with open(given["output"], "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
        except OSError as error:
            raise store_error("write", given["output"], error) from error
    if given["as_json"]:
        echo_text(text)
    elif given["report"] is not None:
        _write_report(given["report"], given["source"], answers)
    else:
        from ostraka.cli._plan_tables import print_document

        print_document(document)
    if not all(limit["ok"] for variant in document["variants"] for limit in variant["limits"]):
        context.exit(LIMIT_EXCEEDED)


def _write_report(output: str, source: str, answers: dict[str, PlanAnswer]) -> None:
    from ostraka.report.plan import describe_plans

    document = describe_plans(source, answers)
    write_page(output, f"plan of {printable(source)} – ostraka", [document])


def _answer(context: click.Context, given: dict[str, Any]) -> dict[str, PlanAnswer]:
    """The plan of each variant, by its title."""
    from ostraka.planner.time import Bandwidths, probe
    from ostraka.report.plan import answer_plan

    probed = Bandwidths() if given["probed"] is None else probe(given["probed"])
    variants = {given["source"]: given}
    variants |= {text: _variant(context, given, text) for text in given["compare"]}
    if len(variants) <= len(given["compare"]):
        raise ValueError("two variants of --compare are the same")
    return {title: answer_plan(_question(own, probed)) for title, own in variants.items()}


def _document(source: str, answers: dict[str, PlanAnswer]) -> dict[str, Any]:
    from ostraka.planner.report import compare_plans

    found = {title: {"title": title, **one.document} for title, one in answers.items()}
    compared = compare_plans(found) if len(found) > 1 else []
    return {"source": source, "variants": [*found.values()], "comparison": compared}


def _variant(context: click.Context, given: dict[str, Any], text: str) -> dict[str, Any]:
    """The options of the command, with those of a variant instead."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"the variant {text!r} has a quote that is not closed") from error
    if not {"-h", "--help"}.isdisjoint(arguments):
        raise ValueError(f"the variant {text!r} can't have options of the whole command")
    own = context.command.make_context("plan", [given["source"], *arguments], parent=context.parent)
    changed = {
        name: value
        for name, value in own.params.items()
        if own.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    for name in ("compare", "as_json", "output", "report", "probed", "names"):
        if name in changed:
            raise ValueError(f"the variant {text!r} can't have options of the whole command")
    if len(changed) < 2:  # the source, and what is different
        raise ValueError(f"the variant {text!r} changes nothing: give it an option of its own")
    return {**given, **changed}


def _question(given: dict[str, Any], probed: Bandwidths) -> PlanQuestion:
    """The options of one variant as a question."""
    from ostraka.planner.state import PlanOptions, mesh_of_sizes
    from ostraka.planner.time import Bandwidths
    from ostraka.report.plan import PlanQuestion

    known = {field.name for field in fields(PlanOptions)}
    chosen = {n: value for n, value in given.items() if n in known and value is not None}
    if "mesh" in chosen:
        chosen["mesh"] = mesh_of_sizes(chosen["mesh"])
    bandwidths = Bandwidths(
        host_write=given["write_bandwidth"] or probed.host_write,
        host_read=given["read_bandwidth"] or probed.host_read,
        storage=given["storage_bandwidth"],
        device=given["device_bandwidth"],
    )
    if given["mtbf"] is not None and bandwidths.peak_write(1) is None:
        raise ValueError(
            "--mtbf needs to know how long a save takes: give --write-bandwidth or --probe"
        )
    if given["onto_hosts"] is not None and not given["onto"]:
        raise ValueError("--onto-hosts goes with --onto, the mesh to restore onto")
    asked = {name: given[name] for name in ("onto_hosts", "keep", "max_file", "max_host_memory")}
    onto = list(map(mesh_of_sizes, given["onto"]))
    return PlanQuestion(
        given["source"],
        PlanOptions(**chosen),
        bandwidths,
        onto=onto,
        mtbf_s=given["mtbf"],
        **asked,
    )
