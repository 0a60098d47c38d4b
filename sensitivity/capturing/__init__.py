"""Reading what a head computes: the recorded operators of one run, checked to be those of every run."""
