"""Studies of speed: a grid of runs, measured in turns and put into one table."""
