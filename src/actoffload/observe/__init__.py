"""What happened: counters and statistics, measured timelines, plots."""
