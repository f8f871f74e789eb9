"""summary.json as a person reads it: a table by category, one by concurrency if there is one, and a sentence for all that is not as it should be."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.stage import Context

IN_PROCESS_TIE = 1e-3  # of logit; what two ways to sum the same float32 products may differ by, with room
DISAGREEMENT = 0.03  # of the acceptance length; more than rounding moves between what was served and what features give


def report(summary: dict[str, Any], context: Context) -> None:
    console = Console(width=max(120, Console().width))
    console.print(_by_category(summary))
    if "concurrency" in summary:
        console.print(_by_concurrency(summary["concurrency"]))
    if len(summary["by_prompt_length"]) > 1:
        console.print(_by_prompt_length(summary["by_prompt_length"]))
    if summary["outlook"]:
        console.print(_of_other_settings(summary["outlook"], summary["num_draft_tokens"]))
    say = context.reporter.say
    for entry in summary["prompts_that_differ"]:
        say(f"evaluate: {entry['id']}: {_parting(entry, summary['dtype'])}")
    if (sampled := summary["fairness"]) and not sampled["fair"]:
        say(
            f"evaluate: warning: the texts sampled with the draft are not drawn from the target's own distribution: {sampled['moved']:.0%} of "
            f"{sampled['tokens']:,} tokens are others than they would be (p = {sampled['p_value']:.1g}). This engine is not lossless with a draft at "
            f"temperature {summary['temperature']:g}: serve greedily, or use another version of it."
        )
    if seen := summary["prompts_seen_in_training"]:
        say(f"evaluate: warning: {len(seen)} of the prompts were also trained on ({seen[0]}, ...): their figures flatter the draft")
    measured, simulated = summary["acceptance_length"] or 0, summary["simulated_acceptance_length"] or 0
    if not agrees(summary):
        likely = "; or ".join(f"as if {each['as_if']} (which gives {each['acceptance_length'] or 0:.3f})" for each in summary["misread"])
        server = f"vLLM {summary['vllm_version']}" if "vllm_version" in summary else "this process"
        reason = f"It serves {likely}." if likely else "No mistake that engines are known to make explains it: check target.dtype and target.extra."
        say(
            f"evaluate: warning: {server} served an acceptance length of {measured:.3f} where the features of the same answers give {simulated:.3f}: the draft "
            f"does not get there what it was trained on. {reason}"
        )
    over = summary["simulated_interval"]
    spread = "" if over is None else f"; other prompts of this kind would give {over[0]:.2f} to {over[1]:.2f} in 95 of 100 cases"
    say(
        f"evaluate: acceptance length {measured:.3f} (simulated {simulated:.3f}{spread}), {summary['speedup']:.2f} times the plain speed; "
        f"{context.folder / 'summary.json'}"
    )


def agrees(summary: dict[str, Any]) -> bool:
    """Whether what was served is what the features of the answers give."""
    measured, simulated = summary["acceptance_length"] or 0, summary["simulated_acceptance_length"] or 0
    # vLLM also counts what the limit then cuts off an answer's last round; tokens over rounds do not, so the truth lies between.
    fewest = (summary["num_tokens"] - summary["num_prompts"]) / max(1, summary["rounds"])
    return bool(min(fewest, measured) * (1 - DISAGREEMENT) <= simulated <= measured * (1 + DISAGREEMENT))


def _by_category(summary: dict[str, Any]) -> Table:
    served = f", served by vLLM {summary['vllm_version']} one at a time" if "vllm_version" in summary else ""
    title = f"Held-out prompts, {summary['num_draft_tokens']} draft tokens, {summary['sampling']}{served}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("category", "prompts", "tokens", "acceptance length", "simulated", "per position", "same tokens", "tokens/s plain", "with draft", "speedup"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for category, part in [*summary["by_category"].items(), ("all", summary)]:
        rates = " ".join("-" if rate is None else f"{rate:.0%}" for rate in part["per_position"])
        length, simulated = (f"{value:.2f}" if value else "-" for value in (part["acceptance_length"], part["simulated_acceptance_length"]))
        same = {True: "yes", None: "-"}.get(part["greedy_identical"], f"{part['num_identical']} of {part['num_prompts']}" if "num_identical" in part else "NO")
        table.add_row(
            category, f"{part['num_prompts']}", f"{part['num_tokens']:,}", length, simulated, rates, same,
            f"{part['plain_tokens_per_second']:.1f}", f"{part['tokens_per_second']:.1f}", f"{part['speedup']:.2f}x",
        )  # fmt: skip
    return table


def _by_prompt_length(parts: list[dict[str, Any]]) -> Table:
    table = Table(title="\nBy the length of the prompt", title_justify="left", box=None, pad_edge=False)
    for name in ("tokens", "prompts", "simulated", "other prompts, 95%"):
        table.add_column(name, justify="right")
    for part in parts:
        span = f"{part['from_tokens']:,} to {part['below_tokens'] - 1:,}" if part["below_tokens"] else f"{part['from_tokens']:,} and more"
        length, over = part["simulated_acceptance_length"], part["simulated_interval"]
        table.add_row(span, f"{part['num_prompts']}", f"{length:.2f}" if length else "-", "-" if over is None else f"{over[0]:.2f} to {over[1]:.2f}")
    return table


def _of_other_settings(outlook: list[dict[str, Any]], num_draft_tokens: int) -> Table:
    table = Table(title="\nOther numbers of draft tokens, from the same answers", title_justify="left", box=None, pad_edge=False)
    names = {"acceptance_length": "acceptance length", "tree_of_2": "tree of 2, at most", "tree_of_4": "of 4, at most", "sampled_draft": "if the draft samples"}
    names = {key: name for key, name in names.items() if key in outlook[0]}
    for name in ("draft tokens", *names.values(), "speedup, about"):
        table.add_column(name, justify="right")
    fastest = max(outlook, key=lambda line: line["speedup"] or 0)
    for line in outlook:
        mark = " fastest" if line is fastest else ""
        lengths = ["-" if line[key] is None else f"{line[key]:.2f}" for key in names]
        speedup = "-" if line["speedup"] is None else f"{line['speedup']:.2f}x"
        table.add_row(f"{line['draft_tokens']}{' (measured)' if line['draft_tokens'] == num_draft_tokens else ''}", *lengths, speedup + mark)
    return table


def _by_concurrency(levels: list[dict[str, Any]]) -> Table:
    table = Table(title="\nAnswers at once", title_justify="left", box=None, pad_edge=False)
    for name in ("at once", "answers", "acceptance length", "tokens/s plain", "with draft", "speedup"):
        table.add_column(name, justify="right")
    for level in levels:
        table.add_row(
            f"{level['concurrency']}", f"{level['num_answers']}", f"{level['acceptance_length'] or 0:.2f}", f"{level['plain_tokens_per_second']:.1f}",
            f"{level['tokens_per_second']:.1f}", f"{level['speedup']:.2f}x",
        )  # fmt: skip
    return table


def _parting(entry: dict[str, Any], dtype: str) -> str:
    if "smallest_margin" in entry:
        rounding = ", which is rounding" if entry["smallest_margin"] < IN_PROCESS_TIE else ""
        return f"the texts part; the target's two best tokens came as close as {entry['smallest_margin']:.2g} in logit{rounding}"
    where = f"the texts part at token {entry['position']} of the answer"
    if entry["gap_nats"] is None:
        return f"{where}, and the token there with the draft is not among the two that the target alone likes best: no rounding, but a fault"
    kind = f"which is rounding in {dtype}" if entry["rounding"] else f"more than rounding in {dtype} usually moves"
    return f"{where}, where the target alone likes the two tokens within {entry['gap_nats']:.2g} nats, {kind}"
