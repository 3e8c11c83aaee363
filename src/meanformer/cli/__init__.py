"""The command line, `meanformer`; one file per command."""

from meanformer.cli.app import app as app
from meanformer.cli.app import load_commands
from meanformer.cli.app import main as main

load_commands()
