"""What held a run's learning back: rules over a run's evidence, one file for each place where it may happen."""
