"""python -m thermalloc run|prof: a Python program on thermalloc, with or without a profile of it."""

import argparse
import os
import sys

from . import _library


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m thermalloc",
        description="Runs a Python program on the thermalloc memory allocator.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a program on thermalloc")
    prof = commands.add_parser("prof", help="run a program on thermalloc and write a profile of it")
    prof.add_argument("-o", "--output", default="thermalloc", help="what names of files begin with")
    prof.add_argument("--exact", action="store_true", help="record every block: slow")
    prof.add_argument("--no-events", action="store_true", help="write dumps only, for long runs")
    prof.add_argument("--inherit-scopes", action="store_true", help="threads inherit the scope that they are created in")
    for command in (run, prof):
        command.add_argument("--conf", action="append", default=[], metavar="NAME:VALUE")
        command.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
        command.add_argument("program", help="a script, or with -m a module")
        command.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _settings(options):
    settings = list(options.conf)
    if options.command != "prof":
        return settings
    prefix = os.path.abspath(options.output)
    settings = ["prof:true", f"prof_prefix:{prefix}", f"prof_pid:{os.getpid()}"] + settings
    # The events of every block say what dumps in between would.
    if options.no_events or not options.exact:
        settings.insert(3, "prof_gdump:true")
    if options.no_events:
        settings.append("prof_final:true")
    else:
        settings.append(f"prof_events:{prefix}.%p.thlog")
    if options.exact:
        settings += ["lg_prof_sample:0", "prof_budget:0"]
    return settings


def main(arguments=None):
    """Becomes the program, so that its exit code and signals are its own."""
    options = _parser().parse_args(arguments)
    try:
        libraries = [str(_library.library())]
        if getattr(options, "inherit_scopes", False):
            libraries.append(str(_library.threads()))
    except FileNotFoundError as missing:
        print(f"thermalloc: {missing}", file=sys.stderr)
        return 127
    environment = dict(os.environ)
    before = environment.get("LD_PRELOAD")
    environment["LD_PRELOAD"] = ":".join(libraries + ([before] if before else []))
    settings = [environment["THERMALLOC_CONF"]] if environment.get("THERMALLOC_CONF") else []
    settings += _settings(options)
    if any("," in setting for setting in settings[1:]):
        print("thermalloc: conf: a comma separates options: give --conf once for each", file=sys.stderr)
        return 2
    if settings:
        environment["THERMALLOC_CONF"] = ",".join(settings)
    command = [sys.executable, *(["-m"] if options.module else []), options.program, *options.arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(main())
