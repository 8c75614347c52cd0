"""``parsolve gpus``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from parsolve.commands.options import output_options

if TYPE_CHECKING:
    from parsolve.specs import Gpu


@click.command("gpus", short_help="GPU presets, and where each number comes from.")
@click.argument("name", metavar="[NAME|FILE]", required=False)
@output_options("table", "json")
def command(name: str | None, **options: Any) -> int:
    """GPU presets; with a name (or a cluster file) that GPU, and where each number comes from.

    \b
    Example:
      parsolve gpus h100-sxm
    """
    from parsolve import presets
    from parsolve.commands.output import Output
    from parsolve.render.data import to_json
    from parsolve.render.specs import facts
    from parsolve.render.text import columns

    output = Output.of(options)
    if name is None:
        names = presets.gpu_names()
        if output.format == "json":
            output.emit(to_json([_preset(stem) for stem in names]))
        else:
            output.emit(columns([_row(stem) for stem in names], HEADER, numbers=(1, 2, 3, 5, 7)))
        return 0
    stem = presets.find("gpus", name)
    if stem is not None:
        data = _preset(stem)
        text = facts(presets.load_gpu(stem), output.width)
        text += "\n\nthe usual machine around it, where a cluster says nothing else\n"
        text += facts(presets.gpu_system(stem), output.width)
    else:
        gpu = _of_cluster(name)
        data, text = gpu.model_dump(mode="json"), facts(gpu, output.width)
    output.emit(to_json(data) if output.format == "json" else text)
    return 0


HEADER = ("GPU", "GiB", "16-bit TFLOPS", "HBM TB/s", "fast link", "GB/s", "domain", "NIC GB/s")


def _row(stem: str) -> tuple[str, ...]:
    from parsolve import presets

    gpu, system = presets.load_gpu(stem), presets.gpu_system(stem)
    peaks = gpu.peak_flops
    return (
        stem,
        f"{gpu.memory_bytes / 2**30:.1f}",
        f"{peaks.get('bf16', peaks.get('fp16', 0.0)) / 1e12:.0f}",
        f"{gpu.memory_bandwidth / 1e12:.2f}",
        system.fast_link.kind,
        f"{system.fast_link.bandwidth / 1e9:.0f}",
        f"{system.domain_size} GPUs",
        f"{system.nic.bandwidth / 1e9:g} x{system.nics_per_host}",
    )


def _preset(stem: str) -> dict[str, Any]:
    from parsolve import presets

    gpu, system = presets.load_gpu(stem), presets.gpu_system(stem)
    return {**gpu.model_dump(mode="json"), "system": system.model_dump(mode="json")}


def _of_cluster(name: str) -> Gpu:
    """The GPU of a cluster preset or file; an unknown name is looked for among GPUs."""
    from pathlib import Path

    from parsolve import presets
    from parsolve.errors import UnknownNameError
    from parsolve.loading import load_cluster

    if not (Path(name).suffix or "/" in name or ":" in name or presets.find("clusters", name)):
        raise UnknownNameError("GPU preset", name, presets.gpu_names())
    return load_cluster(name).gpu
