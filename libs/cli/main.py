"""The ``jigsaw`` command: one line and exit code 1 for every error that we know, 130 for Ctrl-C."""

import sys

import typer

from libs.cli import cluster, demo, doctor, jobs, node, render, samples, submit
from libs.common.errors import JigsawError, leaves
from libs.node.supervisor import Interrupted

INTERRUPTED = 130

HELP = """JigsawRL: several RL post-training pipelines on the same hardware, together.

Begin with: jigsaw doctor, then jigsaw demo. To train your own: jigsaw up --detach, then jigsaw submit JOB.toml --watch.
"""


def make_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    for panel, commands in {
        "The node": (node.up, node.down, demo.demo, doctor.doctor),
        "Jobs": (submit.submit, jobs.jobs, jobs.show, jobs.watch, jobs.cancel, samples.samples),
        "Inside": (cluster.workers, cluster.drain, cluster.migrate, cluster.dead_letters),
    }.items():
        for command in commands:
            app.command(rich_help_panel=panel)(command)
    return app


def main() -> None:
    """Entry point."""
    errors: list[JigsawError] = []
    try:
        make_app()()
    except* JigsawError as group:
        errors.extend(leaves(group))
    except* KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if errors:
        render.warn(f"jigsaw: {errors[0]}")
        sys.exit(INTERRUPTED if isinstance(errors[0], Interrupted) else 1)


if __name__ == "__main__":
    main()
