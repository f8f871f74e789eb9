"""Plans and findings for a person's eyes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.foresight.finding import Finding
from eyas.foresight.plan import Plan
from eyas.progress import clock

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    for finding in findings:
        line = Text(f"{finding.level:<5}", COLOURS[finding.level])
        console.print(line + Text(f"{finding.name:<24} {finding.text}"))
        if finding.step:
            console.print(Text(" " * 30 + finding.step))


def show_plan(plan: Plan, price: float | None, console: Console) -> None:
    target = plan.target
    size, wrapper = "size unknown", target["wrapper"]
    if target["parameters"]:
        size = f"{target['parameters'] / 1e9:,.2f}B parameters, {target['active'] / 1e9:,.2f}B met by a token"
    console.print(Text("Target", "bold"))
    for name, text in (
        ("model", f"{target['architecture']} ({target['model_type']}{f' in its {wrapper}' if wrapper else ''}), {size}"),
        (
            "shape",
            f"{target['layers']} layers, {target['width']:,} wide, {target['attention']}, experts {target['experts']}, vocabulary {target['vocabulary']:,}",
        ),
        ("weights", f"{target['bytes'] / 1e9:,.1f} GB ({target['bytes_from']}), quantisation {target['quantization']}"),
        ("tokenizer", "chat template found" if target["chat_template"] else "no chat template"),
    ):
        console.print(Text(f"  {name:<10} {text}"))
    console.print(Text("\nLayers, as each names them", "bold"))
    table = Table("", "Eyas", "hidden_states", "vLLM", "SGLang", "output of layer", box=None, header_style="")
    for layer in plan.layers:
        table.add_row(f"  {layer['name']}", *(_number(layer[key]) for key in ("eyas", "hidden_states", "vllm", "sglang", "output_of_layer")))
    console.print(table)
    console.print(Text(f"\nStages on {plan.hardware.text}", "bold"))
    for stage in plan.stages:
        took = "?" if stage.seconds is None else clock(stage.seconds)
        source = f" [{stage.source}]" if stage.source and stage.seconds != 0.0 else ""
        console.print(Text(f"  {stage.name:<10} {took:>10}  {stage.text}{source}"))
    if plan.least_seconds:
        least = "at least " if plan.seconds is None else ""
        cost = "" if price is None else f"{least}{plan.cost(price):,.2f} at {price:,.2f} a GPU hour"
        console.print(Text(f"  {'together':<10} {clock(plan.least_seconds):>10}  {cost or least}".rstrip()))
    console.print(Text(f"\nMemory of {'each GPU' if plan.hardware.count else 'the machine'}", "bold"))
    for name, memory in plan.memory.items():
        parts = ", ".join(f"{part} {size / 1e9:,.1f}" for part, size in memory["parts"].items() if size >= 5e7)
        room = f" of {memory['room'] / 1e9:,.1f}" if memory["room"] else ""
        console.print(Text(f"  {name:<10} {memory['need'] / 1e9:,.1f} GB{room}: {parts}"))
    if plan.findings:
        console.print()
        show_findings(plan.findings, console)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
