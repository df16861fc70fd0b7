"""Tools that show a run or give it to others: report, metrics, monitor, export."""
