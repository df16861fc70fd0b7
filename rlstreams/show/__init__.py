"""What shows a run or gives it to other tools: report, metrics, monitor, export."""
