"""The command line, `meanformer`; one file per command."""

from meanformer.cli.app import main as main
