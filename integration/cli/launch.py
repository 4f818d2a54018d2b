"""``integration launch``: the training job on a cluster."""

from pathlib import Path
from typing import Annotated

import typer


def launch(
    config: Annotated[str, typer.Argument(help="One of the configs below.")],
    scheduler: Annotated[str, typer.Option(help="slurm")] = "slurm",
    cluster: Annotated[
        str, typer.Option(help="jupiter, leonardo, or a file of your own (FILE.toml).")
    ] = "jupiter",
    nodes: Annotated[
        int | None,
        typer.Option(help="Nodes that train; the job's own number unless given, 1 for mini."),
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Default: one a GPU, or 1 where there is none.")
    ] = None,
    spares: Annotated[int, typer.Option(help="Further nodes, which wait for one to fail.")] = 0,
    account: Annotated[str | None, typer.Option(help="Who pays. Default: the cluster's.")] = None,
    time: Annotated[
        str | None, typer.Option(help="[DAYS-]HH:MM:SS. Default: the most that is granted.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="Restarts from the last checkpoint after a dead rank or node.")
    ] = 3,
    nccl_max_ctas: Annotated[
        int | None, typer.Option(help="Most SMs of one NCCL collective. Default: NCCL's choice.")
    ] = None,
    nccl_max_p2p_channels: Annotated[
        int | None, typer.Option(help="The same for all-to-all, which the former does not bound.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="As for train; on a shared file system.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="As for train; on a shared file system.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this contribution out. Repeatable.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print the job script only.")] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="Hand the job script to sbatch.")
    ] = False,
) -> None:
    """Write a job script that trains CONFIG. What follows `--` goes to TorchTitan."""
    from integration.cli.main import TITAN_OPTIONS
    from integration.slurm.submit import Request, launch_job

    launch_job(
        Request(
            config=config,
            scheduler=scheduler,
            cluster=cluster,
            nodes=nodes,
            ranks=ranks_per_node,
            spares=spares,
            account=account,
            time=time,
            max_restarts=max_restarts,
            max_ctas=nccl_max_ctas,
            max_p2p_channels=nccl_max_p2p_channels,
            data=data,
            tokenizer=tokenizer,
            without=tuple(without or ()),
            options=tuple(TITAN_OPTIONS),
            dry=dry,
            submit=submit,
        )
    )
