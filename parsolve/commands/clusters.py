"""``parsolve clusters``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from parsolve.commands.options import output_options

if TYPE_CHECKING:
    from parsolve.specs import Cluster

DERIVED = ("num_gpus", "hosts", "processes_per_host", "nic_bandwidth_per_gpu")


@click.command("clusters", short_help="Cluster presets, or a cluster as it is read.")
@click.argument("name", metavar="[NAME|GPU:NxG|FILE]", required=False)
@output_options("table", "json")
def command(name: str | None, **options: Any) -> int:
    """Cluster presets; with a name, GPU:NxG or a file that cluster as it is read, and where each number comes from.

    \b
    Example:
      parsolve clusters h100-sxm:16x8
    """
    from parsolve.commands.output import Output
    from parsolve.loading import load_cluster
    from parsolve.presets import cluster_names, load_cluster_preset
    from parsolve.render.data import to_json
    from parsolve.render.text import columns

    output = Output.of(options)
    if name is None:
        presets = {stem: load_cluster_preset(stem) for stem in cluster_names()}
        if output.format == "json":
            output.emit(to_json([as_json(cluster) for cluster in presets.values()]))
        else:
            rows = [_row(stem, cluster) for stem, cluster in presets.items()]
            output.emit(columns(rows, HEADER, numbers=(1, 3, 5, 6)))
        return 0
    cluster = load_cluster(name)
    output.emit(to_json(as_json(cluster)) if output.format == "json" else _text(cluster, output.width))
    return 0


HEADER = ("cluster", "GPUs", "GPU", "domains x GPUs", "fast link", "GB/s", "NIC GB/s/GPU")


def _row(stem: str, cluster: Cluster) -> tuple[str, ...]:
    return (
        stem,
        str(cluster.num_gpus),
        cluster.gpu.name,
        f"{cluster.domains} x {cluster.gpus_per_domain}",
        cluster.fast_link.kind,
        f"{cluster.fast_link.bandwidth / 1e9:g}",
        f"{cluster.nic_bandwidth_per_gpu / 1e9:g}",
    )


def as_json(cluster: Cluster) -> dict[str, Any]:
    """The cluster as read and what follows from it."""
    return {**cluster.model_dump(mode="json"), **{name: getattr(cluster, name) for name in DERIVED}}


def _text(cluster: Cluster, width: int) -> str:
    from parsolve.render.specs import facts
    from parsolve.units import format_rate

    rate = format_rate(cluster.nic_bandwidth_per_gpu)
    summary = (
        f"{cluster.num_gpus} GPUs on {cluster.hosts} host(s), {cluster.processes_per_host} processes each; "
        f"{rate} of NIC a GPU and direction"
    )
    return f"{facts(cluster, width)}\n\n{summary}"
