"""The benchmark: plan, runs, figures, verdict, plots."""
