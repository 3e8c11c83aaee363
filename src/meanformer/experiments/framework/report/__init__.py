"""The report: one page with every claim, verdict, figure and citation."""

from meanformer.experiments.framework.report.page import Atlas as Atlas
from meanformer.experiments.framework.report.page import render as render
