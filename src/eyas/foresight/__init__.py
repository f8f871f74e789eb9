"""What can be known before anything is paid for: the plan of a run, the state of the machine, a rehearsal."""
