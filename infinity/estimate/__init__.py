"""What a run would do on a machine, before there is one: the planner and its clock, given shapes. No torch, no I/O."""
