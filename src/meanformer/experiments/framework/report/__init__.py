"""The report: one page with every claim, verdict, figure and citation."""

from .page import Atlas as Atlas
from .page import render as render
